"""The accountant against real runs on gloo ranks, counted in another way: by what autograd saves and the optimizer holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshkit as mk
from meshkit.core.sharding import local_tensor
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.preflight.estimate._estimate import count_parameters, result, tracked_step, tracker_of
from tests.tiny import tiny_config
from tests.world import pool

SHAPE = tiny_config(
    vocab_size=1000, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6, head_dim=16
)
ROWS, TOKENS = 3, 64
TOL = 0.01  # small tensors of masks and counters are not told apart
TOL_HELD = 0.1  # buffers of messages, held a moment longer
TOL_MOST = 0.15  # of one purpose at its own height: gloo may hold a buffer of a message a moment longer
CASES: dict[str, dict[str, Any]] = {
    "fp32 on zero 3": {"mesh": "dp_shard=2"},
    "bf16 on zero 3": {"mesh": "dp_shard=2", "memory": mk.MemoryPolicy(precision=mk.strategy.Precision())},
    "selective": {
        "mesh": "dp_shard=2",
        "memory": mk.MemoryPolicy(recompute="selective", precision=mk.strategy.Precision()),
    },
    "tp, sequence": {"mesh": "tp=2", "sequence": True},
    "cp": {"mesh": "cp=2"},
    "cp, chosen blocks": {
        "mesh": "cp=2",
        "context": mk.strategy.ContextPolicy(sparse=mk.strategy.BlockTopK(block=8, top=3)),
    },
}


def choices(case: str) -> dict[str, Any]:
    return {"plan": LLAMA_PLAN, **{key: value for key, value in CASES[case].items() if key != "mesh"}}


def real_run(case: str) -> tuple[mk.Run, torch.optim.Optimizer, dict[str, Tensor]]:
    mesh = mk.init_mesh(CASES[case]["mesh"], device_type="cpu")
    with torch.device("meta"):
        model = Llama(SHAPE)
    run = mk.parallelize(model, mesh, **choices(case))
    mk.init_weights(run.model, seed=0)
    generator = torch.Generator().manual_seed(mesh.data_rank)  # different data on each rank
    ids = torch.randint(SHAPE.vocab_size, (ROWS, TOKENS), generator=generator)
    return run, mk.adamw(run, lr=1e-3), {"input_ids": ids, "labels": ids}


def counted_by_hooks(case: str) -> tuple[int, int, int, int]:
    """(bytes autograd keeps, of them in tensors with the vocabulary as a dim, parameters, state of the optimizer)."""
    run, optimizer, batch = real_run(case)
    run.forward_backward(batch)
    optimizer.step()
    optimizer.zero_grad()
    params = {local_tensor(param).untyped_storage()._cdata for param in run.parameters()}
    vocabulary = local_tensor(run.model.lm_head.weight).shape[0]
    if run.mesh.spec.tp == 1:
        vocabulary = SHAPE.vocab_size
    saved: dict[int, tuple[int, bool]] = {}
    gathered: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        is_weight = tensor.requires_grad and tensor.is_leaf
        storage = tensor.untyped_storage()
        if storage._cdata not in params and not is_weight and tensor.dtype.is_floating_point:
            before = saved.get(storage._cdata, (0, False))[1]
            logits = before or (tensor.ndim >= 2 and tensor.shape[-1] == vocabulary and tensor.shape[0] >= TOKENS)
            saved[storage._cdata] = (storage.nbytes(), logits)
            gathered.append(tensor)
        return tensor

    def loss(model: Any, part: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return mk.step.next_token_loss(model, part)

    weights: set[int] = set()

    def note_weights(module: torch.nn.Module, args: Any, out: Any) -> None:
        """When a module has just run, its parameters are still those that were gathered."""
        held = [local_tensor(param) for param in module._parameters.values() if param is not None]
        weights.update(param.untyped_storage()._cdata for param in held)

    hook = torch.nn.modules.module.register_module_forward_hook(note_weights)
    run.forward_backward(batch, loss=mk.step.additive(loss))  # not tried: that runs modules too
    hook.remove()
    optimizer.step()
    kept = {key: value for key, value in saved.items() if key not in weights}
    states = [value for state in optimizer.state.values() for value in state.values()]
    return (
        sum(size for size, _ in kept.values()),
        sum(size for size, logits in kept.values() if logits),
        sum(local_tensor(param).nbytes for param in run.parameters()),
        sum(local_tensor(value).nbytes for value in states),
    )


def tracked(case: str) -> mk.preflight.estimate.Estimate:
    """The same tracker on real tensors."""
    run, optimizer, batch = real_run(case)
    tracker = tracker_of(run)
    with tracker:
        count_parameters(tracker, run.model)
        for _ in range(2):
            tracker.forget_points()
            tracked_step(tracker, run, optimizer, batch, 1)
    return result(tracker, run, {}, kernels="cpu")


def estimated(case: str) -> mk.preflight.estimate.Estimate:
    with torch.device("meta"):
        model = Llama(SHAPE)
    return mk.estimate(model, CASES[case]["mesh"], rows=ROWS, seq_len=TOKENS, kernels="cpu", **choices(case))


@pytest.mark.parametrize("case", [case for case in CASES if case != "selective"])
def test_activations_logits_and_states_are_what_autograd_saves_and_the_optimizer_holds(case: str) -> None:
    kept, logits, params, states = pool(2).run(counted_by_hooks, case)[0]
    found = estimated(case)
    assert found.parameter_bytes == params
    assert found.optimizer_bytes == pytest.approx(states, rel=TOL)
    estimate_kept = found.after_forward["activations"] + found.after_forward["logits and loss"]
    assert estimate_kept == pytest.approx(kept, rel=TOL), (kept, found.after_forward, found.activations)
    assert logits > 0


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_what_the_same_tracker_counts_in_a_real_run(case: str) -> None:
    real, found = pool(2).run(tracked, case)[0], estimated(case)
    reduction = "gradients in reduction"
    # gloo holds the buffers of a finished message while the next runs, for as long as its threads need: up to 5.4 % of the
    # peak was seen on a busy machine. An estimate counts none of it, and nothing that is not there.
    assert found.peak_bytes <= real.peak_bytes * (1 + TOL)
    assert real.peak_bytes <= found.peak_bytes * (1 + TOL_HELD)
    if real.peak_bytes == pytest.approx(
        found.peak_bytes, rel=TOL
    ):  # else a held buffer may have made another point the peak
        assert found.where == real.where
    for group, size in real.most.items():
        if size > real.peak_bytes / 50 and group != reduction:
            assert found.most[group] == pytest.approx(size, rel=TOL_MOST), group
