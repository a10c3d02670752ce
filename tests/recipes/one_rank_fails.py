"""A recipe in which rank 1 fails in the middle of a step."""

import torch
from torch import nn

import meshkit as mk
from meshkit.faults import run_main


def main() -> None:
    mesh = mk.init_mesh("dp_shard=2")
    torch.manual_seed(0)
    run = mk.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh)

    def loss(model: nn.Module, batch: mk.step.Batch) -> torch.Tensor:
        if mesh.rank == 1:
            raise mk.errors.PlanError("this rank has had enough")
        return model(batch["x"]).sum()

    vouched = mk.step.additive(loss)  # else its trial, before the step, raises on every rank
    run.forward_backward({"x": torch.ones(2, 4)}, loss=vouched, count=lambda batch: torch.tensor(2))


if __name__ == "__main__":
    run_main(main)
