"""Names of torch's operators that send: what each is called in the field, and which ones only wait."""

NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce_": "all_reduce",  # of compiled code
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "recv_": "recv",
}
SAME_SIZE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")  # on all ranks
BETWEEN_TWO = ("send", "recv", "recv_any_source_")
WAITS = ("wait_tensor", "_wrap_tensor_autograd")
SPACES = ("c10d", "_c10d_functional")
