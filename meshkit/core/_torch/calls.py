"""Recording of calls in which ranks meet: methods of ProcessGroup, `Work.wait`, and functional collectives of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from meshkit.core._torch.groups import process_group
from meshkit.core._torch.tracing import is_fake
from meshkit.core.calls import Call, Meeting, ring

# [Note: what a call's times mean]
# `began` is when the host issues a call, `waited` and `ended` are the ends of `Work.wait`. With gloo the host itself waits,
# so `ended` is when the call was done on this rank. With NCCL the host only tells its stream to wait: `ended` says that the
# host went on, and nothing of the device. What is compared between ranks, how many calls each has made and which, is the
# host's on both: a host that waits for its device (a loss that is read) makes no further call.

# Private: that functions of torch.distributed, FSDP's among them, call these methods of the group's Python class, which takes
# new ones. 2.15 has hooks on a backend (register_pre_hook); its gloo has none. Checked: 2.11 (read), 2.15. Replaced by:
# those hooks, where all backends have them.
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "barrier": ("barrier", -1),
    "monitored_barrier": ("barrier", -1),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
_recording = False
_by_work: dict[int, Call] = {}  # not yet waited for


def record_calls() -> None:
    """From now on the calls of this process come into `core.calls.ring`. Once is enough."""
    global _recording
    if _recording:
        return
    _recording = True
    for name, (op, position) in _METHODS.items():
        if (method := getattr(ProcessGroup, name, None)) is not None:
            setattr(ProcessGroup, name, _recorded(method, op, position))
    dist.Work.wait = _ending(dist.Work.wait)  # type: ignore[method-assign]  # for good


def begin_call(op: str, tensor: Tensor, group_name: str) -> Call | None:
    """A functional collective, which calls the process group in C++. None where nobody records."""
    if not _recording or ring.paused or (type(tensor) is not Tensor and is_fake(tensor)):  # of a program that is read
        return None
    meeting = ring.meetings.get(group_name) or _meeting(process_group(group_name), group_name, None)
    return ring.begin(meeting, op, tensor.nbytes) if len(meeting.ranks) > 1 else None


def _recorded(method: Callable[..., Any], op: str, position: int) -> Callable[..., Any]:
    between_two = op in ("send", "recv")

    def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if ring.paused:
            return method(group, *args, **kwargs)
        name: str = group.group_name
        key = name
        if between_two:
            peer = args[1] if len(args) > 1 else kwargs["dstRank" if op == "send" else "srcRank"]
            key = f"{name}>{op}{peer}"
        meeting = ring.meetings.get(key) or _meeting(group, key, (op, peer) if between_two else None)
        if len(meeting.ranks) == 1:
            return method(group, *args, **kwargs)
        sent = args[position] if 0 <= position < len(args) else ()
        size = _bytes(sent)
        record = ring.begin(meeting, op, size)
        work = method(group, *args, **kwargs)
        if isinstance(work, dist.Work):
            if len(_by_work) > 4096:  # works that nobody waits for
                _by_work.clear()
            _by_work[id(work)] = record
        return work

    return call


def _ending(wait: Callable[..., Any]) -> Callable[..., Any]:
    def ending_wait(work: Any, *args: Any) -> Any:
        call = _by_work.pop(id(work), None)
        if call is None:
            return wait(work, *args)
        call.wait()
        done = wait(work, *args)  # a call whose wait raises has no end
        call.end()
        return done

    return ending_wait


def _meeting(group: ProcessGroup, key: str, message: tuple[str, int] | None) -> Meeting:
    ranks = dist.get_process_group_ranks(group)
    if message is not None:
        op, peer = message
        pair = (dist.get_rank(), ranks[peer])
        ranks = list(pair if op == "send" else pair[::-1])
    meeting = Meeting(group.group_name, ranks, is_message=message is not None)
    ring.meetings[key] = meeting
    return meeting


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_bytes(each) for each in value) if isinstance(value, list | tuple) else 0
