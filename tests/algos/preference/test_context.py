"""A preference objective of answers whose tokens lie on several ranks of cp, against one device with one answer a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.algos.preference import (
    Pairs,
    PreferenceLoss,
    packed_logps,
    preference_loss,
    sequence_logps,
    whole_sequences,
)
from meshkit.core.sharding import full_tensor
from meshkit.loss import IGNORED
from meshkit.models import LLAMA_PLAN, Llama
from tests.laws.parity.cases import mesh_for
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64 = 1e-10  # law 1
CONFIG = tiny_config(num_attention_heads=2, head_dim=8)
PAIRS, TOKENS = 4, 11  # two pairs for each rank with rows of its own; no multiple of cp
LOSS = PreferenceLoss(kind="ipo_mean", beta=0.2)


def step() -> dict[str, Tensor]:
    """Rows 2n and 2n + 1 are pair n. Answers of 1 to 7 tokens, with one that both lengths of the split cut differently."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 32, (2 * PAIRS, TOKENS + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(2 * PAIRS):
        labels[row, : 3 + row % 4] = IGNORED
        labels[row, TOKENS - row :] = IGNORED
    labels[0, 1:] = IGNORED
    labels[0, 0] = 5
    return {
        "input_ids": ids[:, :-1],
        "labels": labels,
        "ref_logps": -3 * torch.rand(2 * PAIRS, TOKENS, generator=generator).double(),
    }


def token_logps(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def losses_of(policy: Tensor, ref: Tensor, tokens: Tensor) -> Tensor:
    pairs = Pairs(
        chosen=policy[0::2],
        rejected=policy[1::2],
        ref_chosen=ref[0::2],
        ref_rejected=ref[1::2],
        chosen_tokens=tokens[0::2],
        rejected_tokens=tokens[1::2],
    )
    return preference_loss(pairs, LOSS).losses


def on_ranks(axes: str) -> tuple[float, dict[str, Tensor]]:
    mesh = mesh_for(axes)
    batch = {name: tensor.tensor_split(mesh.data_ranks)[mesh.data_rank] for name, tensor in step().items()}
    sequences = len(batch["labels"])
    batch["sequence"] = torch.arange(sequences).unsqueeze(1).expand(sequences, TOKENS)
    run = mk.parallelize(Llama(CONFIG).double(), mesh, plan=LLAMA_PLAN)
    mk.init_weights(run.model, seed=0)

    def loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        inputs = {name: part[name] for name in ("input_ids", "position_ids", "mask") if name in part}
        valid = part["labels"] != IGNORED
        logps = token_logps(model(**inputs), part["labels"])
        policy, ref, tokens = (
            whole_sequences(packed_logps(values, valid, part["sequence"], sequences), mesh["cp"])
            for values in (logps, part["ref_logps"], valid.double())
        )
        return losses_of(policy, ref, tokens).sum() / mesh["cp"].size()

    def count(batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["labels"]) // 2)

    found = run.forward_backward(batch, loss=mk.step.additive(loss), count=count)
    return found.item(), {name: full_tensor(param.grad) for name, param in run.named_parameters()}


def test_answers_split_over_cp_equal_one_device() -> None:
    model = Llama(CONFIG).double()
    mk.init_weights(model, seed=0)
    batch = step()
    mask = batch["labels"] != IGNORED
    policy = sequence_logps(token_logps(model(batch["input_ids"]), batch["labels"]), mask)
    loss = losses_of(policy, sequence_logps(batch["ref_logps"], mask), mask.sum(1)).mean()
    loss.backward()
    for found, gradients in pool(4).run(on_ranks, "dp_shard=2 cp=2"):
        assert abs(found - loss.item()) < TOL_FP64
        for name, param in model.named_parameters():
            assert param.grad is not None and (gradients[name] - param.grad).abs().max() < TOL_FP64, name


def test_packed_answers_have_the_sums_of_rows() -> None:
    logps = -torch.rand(1, 9, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1]])
    sequence = torch.tensor([[0, 0, 0, 2, 2, 1, 1, -1, 1]])
    got = packed_logps(logps, mask, sequence, 4)
    x = logps[0]
    assert torch.allclose(
        got, torch.stack([x[:2].sum(), x[5] + x[8], x[3:5].sum(), x.new_zeros(())]), rtol=0, atol=1e-15
    )
    assert F.mse_loss(packed_logps(logps.bfloat16(), mask, sequence, 4), got.float()) < 1e-4  # added in fp32
