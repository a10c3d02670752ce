"""DeepSpeed: its engine with ZeRO 1, 2 or 3 around transformers' decoder, on gloo.

DS_ACCELERATOR=cpu is all that a CPU needs. The optimizer is torch's fused AdamW, as in the other loops, and not
DeepSpeed's own for CPUs, which is compiled at first use and updates by other kernels.
"""

from __future__ import annotations

import logging
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.turns import Turns
from benchmarks.peers.work import (
    BETAS,
    EPS,
    LEARNING_RATE,
    MAX_NORM,
    Training,
    decay_groups,
    mean_over_ranks,
    repeat,
    transformers_model,
)


def train(work: Training, turns: Turns) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    model = transformers_model(work)
    optimizer = torch.optim.AdamW(decay_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
    rows = work.rows // work.spec.world_size
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": rows,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": work.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )

    def step(input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = engine(input_ids=input_ids).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        engine.backward(loss)
        engine.step()
        return mean_over_ranks(loss)

    repeat(step, work, turns)
