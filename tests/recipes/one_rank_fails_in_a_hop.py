"""A recipe in which the second kernel call of rank 1 fails, while its neighbours wait for its keys.

MESHKIT_TEST_SCHEME: how attention comes together. MESHKIT_TEST_ERROR: "plan" for an error of meshkit's, else Python's.
"""

import os

import torch

import meshkit as mk
from meshkit.faults import run_main
from meshkit.models.llama import Llama
from tests.tiny import tiny_config

CONFIG = tiny_config(vocab_size=16, intermediate_size=16, num_hidden_layers=1, num_key_value_heads=4)


def break_the_second_call() -> None:
    whole, calls = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, 0
    error = mk.errors.PlanError if os.environ["MESHKIT_TEST_ERROR"] == "plan" else RuntimeError

    def broken(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error("this kernel has had enough")
        return whole(*args, **kwargs)

    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu = broken  # type: ignore[assignment]


def main() -> None:
    mesh = mk.init_mesh("cp=3")
    torch.manual_seed(0)
    policy = mk.strategy.ContextPolicy(scheme=os.environ["MESHKIT_TEST_SCHEME"], balance="zigzag")  # type: ignore[arg-type]
    run = mk.parallelize(Llama(CONFIG), mesh, context=policy)
    if mesh.rank == 1:
        break_the_second_call()
    ids = torch.zeros(1, 24, dtype=torch.int64)
    run.forward_backward({"input_ids": ids, "labels": ids})


if __name__ == "__main__":
    run_main(main)
