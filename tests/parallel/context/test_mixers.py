"""Recurrent mixers over tokens on several ranks equal their recurrence, with every gradient; what they send is explained."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshkit import parallelize
from meshkit.mask import Mask
from meshkit.mesh import fake_world, init_mesh
from meshkit.parallel.context import Layout, Shape, SplitMask, chain_of, choose, halo_traffic, state_traffic
from meshkit.parallel.context._pieces import pieces_of
from meshkit.preflight.observe import observe
from meshkit.strategy import ContextPolicy
from tests.laws.parity.cases import Cell, build, mesh_for, plan_of
from tests.models.mixers import recurrence
from tests.parallel.context.test_attention import Case, own, split_mask
from tests.world import pool

TOL = 1e-10  # only the order of summation differs
POLICIES = {
    "contiguous": ContextPolicy(scheme="ring", balance="contiguous"),
    "zigzag": ContextPolicy(scheme="ring", balance="zigzag"),
    "per_document": ContextPolicy(scheme="ring", balance="per_document"),
    "locality": ContextPolicy(scheme="ring", balance="locality"),
    "ulysses": ContextPolicy(scheme="ulysses"),
}
DOCUMENTS = {
    "one": [150],  # more than a chunk on each rank
    "packed": [7, 70, 1, 1, 40, 31],
    "few tokens": [2],  # of which ranks have one or none
    "each its own": [1] * 6,
}
WIDTH = 4


def rows_of(lengths: list[int]) -> int:
    return 2 if len(lengths) == 1 else 1


def worst_of(mask: SplitMask, found: list[Tensor], expected: list[Tensor]) -> float:
    real = slice(0, mask.real_tokens)
    errors = [(mine - own(mask, whole))[:, real] for mine, whole in zip(found, expected, strict=True)]
    return max(float(error.abs().max()) if error.numel() else 0.0 for error in errors)


def case_of(policy: str, documents: str, ranks: int) -> Case:
    lengths = DOCUMENTS[documents]
    return Case(ranks=ranks, mask=Mask.documents(lengths), policy=POLICIES[policy], rows=rows_of(lengths), multiple=2)


def scan_errors(policy: str, documents: str, ranks: int, delta: bool) -> float:
    lengths = DOCUMENTS[documents]
    inputs, dout = recurrence.scan_inputs(rows_of(lengths), sum(lengths), delta=delta)
    for each in inputs:
        each.requires_grad_()
    rest = [] if delta else [None]
    out = recurrence.scan(*inputs, *rest, lengths)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN, receive buffers too
    mask = split_mask(case_of(policy, documents, ranks))
    local = [own(mask, each.detach()).requires_grad_() for each in inputs]
    found = mask.linear_attention(*local, *rest)
    grads = torch.autograd.grad(found, local, own(mask, dout))
    torch.use_deterministic_algorithms(False)
    assert not found[:, mask.real_tokens :].any(), "padding has a result"
    return worst_of(mask, [found.detach(), *grads], expected)


def convolution_errors(policy: str, documents: str, ranks: int) -> float:
    lengths = DOCUMENTS[documents]
    generator = torch.Generator().manual_seed(5)
    shape = (rows_of(lengths), sum(lengths), 3)
    x, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    x.requires_grad_()
    out = recurrence.convolution(x, weight, lengths)
    expected = [out.detach(), *torch.autograd.grad(out, (x, weight), dout)]
    torch.use_deterministic_algorithms(True)
    mask = split_mask(case_of(policy, documents, ranks))
    local = own(mask, x.detach()).requires_grad_()
    found = mask.short_convolution(local, weight)
    dx, dweight = torch.autograd.grad(found, (local, weight), own(mask, dout).nan_to_num())
    torch.use_deterministic_algorithms(False)
    dist.all_reduce(dweight)
    worst = worst_of(mask, [found.detach(), dx], expected[:2])
    return max(worst, float((dweight - expected[2]).abs().max()))


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_scan_over_ranks_equals_the_recurrence(policy: str, documents: str, delta: bool) -> None:
    assert max(pool(4).run(scan_errors, policy, documents, 4, delta)) < TOL


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_scan_over_any_number_of_ranks_equals_the_recurrence(ranks: int) -> None:
    for documents in ("one", "packed"):
        assert max(pool(ranks).run(scan_errors, "zigzag", documents, ranks, True)) < TOL


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_convolution_over_ranks_equals_one_device(policy: str, documents: str) -> None:
    assert max(pool(4).run(convolution_errors, policy, documents, 4)) < TOL


def sent_and_said(policy: str, documents: str, ranks: int) -> tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]:
    lengths = DOCUMENTS[documents]
    mesh, mask = mesh_for(f"cp={ranks}"), split_mask(case_of(policy, documents, ranks))
    inputs, _ = recurrence.scan_inputs(rows_of(lengths), sum(lengths), delta=True)
    local = [own(mask, each).requires_grad_() for each in inputs]
    x = own(mask, inputs[2].flatten(2)).requires_grad_()
    with observe(mesh) as seen:
        mask.linear_attention(*local).sum().backward()
        mask.short_convolution(x, torch.ones(12, WIDTH, dtype=torch.float64)).sum().backward()
    state, token = 8 * rows_of(lengths) * 4 * 5 * 3, 8 * rows_of(lengths) * 12
    said = Counter[tuple[str, int]]()
    for forward, backward in (
        state_traffic(mask.layout, mask.rank, state_bytes=state),
        halo_traffic(mask.layout, mask.rank, width=WIDTH, token_bytes=token),
    ):
        said += forward + backward
    return Counter({(message.op, message.size): count for message, count in seen.items()}), said


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_sent_states_and_tokens_are_the_explained_ones(policy: str, documents: str) -> None:
    for sent, said in pool(4).run(sent_and_said, policy, documents, 4):
        assert sent == said


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_document_of_contiguous_tokens_passes_one_state_less_than_it_has_ranks(ranks: int) -> None:
    for balance, sent, rounds in (("contiguous", ranks - 1, ranks - 1), ("zigzag", 2 * ranks - 2, 2 * ranks - 2)):
        layout = layout_of_ranks(
            Case(ranks=ranks, mask=Mask.causal(64), policy=ContextPolicy(scheme="ring", balance=balance))
        )  # type: ignore[arg-type]
        assert chain_of(layout) == (sent, rounds)
        assert sum(sum(state_traffic(layout, rank, state_bytes=1)[0].values()) for rank in range(ranks)) == sent


def layout_of_ranks(case: Case) -> Layout:
    return choose(case.mask, case.ranks, case.policy, Shape(heads=4, kv_heads=2, head_dim=8)).layout


def test_documents_that_end_where_ranks_do_pass_nothing() -> None:
    case = Case(ranks=4, mask=Mask.documents([16] * 4), policy=ContextPolicy(scheme="ring", balance="contiguous"))
    layout = layout_of_ranks(case)
    assert all(piece.begins for piece in pieces_of(layout))
    assert chain_of(layout) == (0, 0)


@pytest.mark.parametrize("mixer", ["delta", "mamba2"])
def test_a_model_in_bf16_is_read_in_bf16(mixer: str) -> None:
    cell = Cell(mesh="cp=2", mixer=mixer, dtype="bfloat16")
    model, dtypes = build(cell), set[torch.dtype]()
    model.get_submodule("layers.0.mixer").register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    with fake_world(2):
        parallelize(model, init_mesh("cp=2", device_type="cpu"), plan=plan_of(cell))
    assert dtypes == {torch.bfloat16}
