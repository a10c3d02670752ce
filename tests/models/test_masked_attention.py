"""Attention under a mask: no tensor of all pairs of tokens, one launch for packed documents, one graph, and the formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from torch import Tensor

import meshkit as mk
from meshkit.core import masked_attention as module
from meshkit.core import to_device as copies
from meshkit.core._torch import FakeTensorMode, TorchDispatchMode, tree_leaves
from meshkit.core.attention_kernels import CUDA_FLASH, MATH
from meshkit.core.custom_op import body_of
from meshkit.mask import Mask
from meshkit.memory import recompute
from meshkit.models import Llama, layers
from meshkit.models.layers import MaskedRows, attention, attention_mask
from tests.test_mask import masks
from tests.tiny import tiny_config
from tests.world import pool

TOL_FP64_SUM = 1e-10  # only the order of summation differs
TOL_BF16 = 2e-2  # twice what rounding scores and probabilities to bf16 changes
TOKENS = 2200  # more pairs than any other tensor has elements
DOCUMENTS = {1: [TOKENS], 7: [314] * 6 + [316], 50: [44] * 50}


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


class Watched(TorchDispatchMode):
    """Largest tensor that an operator returns, and how often each runs; looks into ours, as dispatch is off there."""

    def __init__(self, *, inside: bool = True) -> None:
        super().__init__()
        self.inside, self.largest, self.calls = inside, 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.calls[name] += 1
        body = body_of(name)
        if body is not None and self.inside:
            with self:
                return body(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


def small() -> Llama:
    torch.manual_seed(0)
    return Llama(tiny_config(vocab_size=64))


def step(model: Any, lengths: list[int], watched: Watched) -> None:
    with watched:
        model(torch.arange(TOKENS)[None] % 64, positions(lengths)).square().mean().backward()


@contextmanager
def kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ "math" is what CUDA computes fp32 with."""
    if name == "math":
        monkeypatch.setattr("meshkit.core.attention_kernels.CPU_FLASH", MATH)
    yield


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("mode", ["none", "full", "selective", "activation"])
def test_no_operator_makes_a_tensor_of_all_pairs_of_tokens(
    mode: Any, window: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    model.config = tiny_config(vocab_size=64, sliding_window=window)
    recompute(model, blocks=[f"layers.{index}" for index in range(2)], mode=mode)
    watched = Watched()
    with kernel(name, monkeypatch):
        step(model, [1400, 790, 10], watched)
    assert watched.calls["meshkit::masked_attention"] >= 2
    assert watched.largest < TOKENS * TOKENS


def test_a_dense_mask_would_be_seen() -> None:
    """The law can fail."""
    watched = Watched()
    q, k, v = torch.randn(3, 1, TOKENS, 1, 8)
    with watched:
        attention(q, k, v, Mask.documents([1400, 800]).dense()[None, None])
    assert watched.largest >= TOKENS * TOKENS


def largest_under(chosen: str) -> tuple[int, int]:
    """(largest tensor of a step, calls of the operator), with a budget that has to recompute, or under observe."""
    mesh = mk.init_mesh("dp_shard=1")
    memory = (
        mk.MemoryPolicy(recompute=mk.strategy.Budget(bytes=5 << 20, rows=1, seq_len=TOKENS))
        if chosen == "budget"
        else mk.MemoryPolicy()
    )
    run = mk.parallelize(small(), mesh, memory=memory)
    watched = Watched()
    # Inside of the observer: a mode that is entered later sees an operator first.
    with mk.observe(mesh) if chosen == "observe" else nullcontext(), watched:
        run.model(torch.arange(TOKENS)[None] % 64, positions([1400, 790, 10])).square().mean().backward()
    return watched.largest, watched.calls["meshkit::masked_attention"]


@pytest.mark.parametrize("name", ["1", "7", "50"])
def test_launches_of_a_layer_do_not_depend_on_the_number_of_documents(name: str) -> None:
    """On a fake CUDA, by the operators inside of ours, forward and backward."""
    mask = Mask.documents(DOCUMENTS[int(name)])
    table = module.mask_table(mask)
    with FakeTensorMode(), Watched() as watched:
        ends = module.document_ends(mask, 2, torch.device("cuda"))
        q, dout = torch.randn(2, 2, TOKENS, 8, 64, dtype=torch.bfloat16, device="cuda").unbind()
        k, v = torch.randn(2, 2, TOKENS, 2, 64, dtype=torch.bfloat16, device="cuda").unbind()
        watched.calls.clear()
        out, lse = body_of("meshkit::masked_attention")(q, k, v, table, ends, 0.125)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:-1], torch.float32)
        grads = body_of("meshkit::masked_attention_backward")(dout, q, k, v, out, lse, table, ends, 0.125)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert watched.calls["aten::_flash_attention_forward"] == watched.calls["aten::_flash_attention_backward"] == 1
    assert not [call for call in watched.calls if "scaled_dot_product" in call or "mm" in call]


def test_the_kept_result_of_selective_recompute_is_not_computed_again() -> None:
    model = small()
    recompute(model, blocks=["layers.0", "layers.1"], mode="selective")
    watched = Watched(inside=False)
    step(model, DOCUMENTS[7], watched)
    assert watched.calls["meshkit::masked_attention"] == watched.calls["meshkit::masked_attention_backward"] == 2


def test_other_documents_are_no_other_graph() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    torch.compiler.reset()
    layer = small().layers[0]
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    ids, x = torch.zeros(1, TOKENS, dtype=torch.int64), torch.randn(1, TOKENS, layer.self_attn.q_proj.in_features)
    graphs = []
    for lengths in ([1400, 800], [1, 2199], DOCUMENTS[7], DOCUMENTS[50], [44] * 49 + [22, 22], [1000, 1200]):
        place = positions(lengths)
        cos, sin = layers.rope_tables(layers.Rope(), place, layer.self_attn.head_dim, dtype=torch.float32)
        with torch.no_grad():
            compiled(x, cos, sin, attention_mask(ids, place, window=None))
        graphs.append(counter.frame_count)
    assert graphs == [1] * 6


# ------------------------------------------------------------------------------------------------------------ the maths


def by_formula(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    """shown: bool [B, T, T]; a query that sees nothing has zeros."""
    wide = [x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v)]
    scores = torch.einsum("bthd,bshd->bhts", q, wide[0]) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~shown[:, None], -torch.inf)
    weights = torch.where(shown.any(-1)[:, None, :, None], scores.softmax(-1).nan_to_num(), 0.0)
    return torch.einsum("bhts,bshd->bthd", weights, wide[1])


@settings(max_examples=60, deadline=None)
@given(mask=masks)
def test_any_mask_is_its_formula_with_gradients(mask: Mask) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, mask.tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = MaskedRows(mask, 2, mask.tokens, torch.device("cpu")).attend(q, k, v)
    shown = mask.dense().expand(2, -1, -1)
    # Scores of a query that sees nothing are left out before the softmax, or autograd would make NaN of them.
    seeing = shown.any(-1)
    expected = by_formula(q, k, v, shown | ~seeing[..., None]) * seeing[..., None, None]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOL_FP64_SUM)
    weights = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOL_FP64_SUM)


def reference_forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *rest: Any, scale: float, **window: int) -> Any:
    """The contract of aten._flash_attention_forward on packed rows [N, H, D]: one document after the other."""
    outs, lses = [], []
    ends_k, longest, _, dropout, causal, debug = rest
    assert ends is ends_k and causal and not dropout and not debug
    assert longest == max(after - first for first, after in pairwise(ends.tolist()))
    for first, after in pairwise(ends.tolist()):
        shown = Mask.causal(after - first, window=window.get("window_size_left", longest) + 1).dense()
        wide = [x[first:after].repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
        scores = torch.einsum("thd,shd->hts", q[first:after], wide[0]) * scale
        scores = scores.masked_fill(~shown, -torch.inf)
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1), wide[1]))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1), None, None, None


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **given: Any
) -> Any:
    ends, ends_k, longest, _, dropout, causal, *_ = rest
    again, lse_again, *_ = reference_forward(q, k, v, ends, ends_k, longest, longest, dropout, causal, False, **given)
    # What backward gets is what forward gave, in its layout.
    torch.testing.assert_close(out, again, rtol=0, atol=TOL_FP64_SUM)
    torch.testing.assert_close(lse, lse_again, rtol=0, atol=TOL_FP64_SUM)
    dq, dk, dv, group = *(torch.empty_like(x) for x in (q, k, v)), q.shape[1] // k.shape[1]
    for first, after in pairwise(ends.tolist()):
        rows = slice(first, after)
        shown = Mask.causal(after - first, window=given.get("window_size_left", longest) + 1).dense()
        wide_k, wide_v = (x[rows].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q[rows], wide_k) * given["scale"]
        p = scores.masked_fill(~shown, -torch.inf).softmax(-1)
        dp = torch.einsum("thd,shd->hts", dout[rows], wide_v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * given["scale"]
        dq[rows] = torch.einsum("hts,shd->thd", ds, wide_k)
        for total, weights, other in ((dk, ds, q), (dv, p, dout)):
            wide = torch.einsum("hts,thd->shd", weights, other[rows])
            total[rows] = wide.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("joined", [False, True])
def test_the_launch_of_variable_length_gets_what_its_kernel_takes(
    window: int | None, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, by an implementation of the kernel's contract, against tiles."""
    operators = SimpleNamespace(
        _flash_attention_forward=reference_forward, _flash_attention_backward=reference_backward
    )
    tokens = 24
    mask = Mask.documents([9, 1, 10, 4] * (2 if joined else 1), window=window)
    results = []
    for launch in (True, False):
        torch.manual_seed(1)
        leaves = [torch.randn(2, tokens, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
        rows = MaskedRows(mask, 2, tokens, torch.device("cpu"))
        with monkeypatch.context() as patch:
            if launch:
                patch.setattr(module, "_aten", operators)
                patch.setattr(module, "kernel_for", lambda *_: CUDA_FLASH)
                per_row = [0, 9, 10, 20, 24]
                rows.ends = torch.tensor([*per_row, *(24 + end for end in per_row[1:])], dtype=torch.int32)
            out = rows.attend(*leaves)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOL_FP64_SUM)


def test_packed_documents_are_told_from_other_masks() -> None:
    for lengths, window in (([5], None), ([3, 1, 4], None), ([3, 1, 4], 2), ([3, 1, 4], 1), ([8, 2], 8)):
        packed = module.packed_documents(Mask.documents(lengths, window=window))
        assert packed is not None and packed.ends == tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))
        assert packed.longest == max(lengths)
        assert Mask.documents(lengths, window=packed.window).windowed(9) == Mask.documents(
            lengths, window=window
        ).windowed(9)
    one_window = Mask.joined([Mask.causal(6, window=2), Mask.causal(6, window=3)])
    for other in (Mask.full(3), Mask.prefix_lm([5, 4], [2, 0]), one_window, Mask.intervals(3, []), Mask.full(1)):
        expected = module.Packed((0, 1), None) if other.tokens == 1 else None  # one token sees itself in either
        assert module.packed_documents(other) == expected


def test_documents_are_read_from_the_host_s_copy() -> None:
    """Stands in for a device: a tensor whose values would be wrong if they were read."""
    host = positions([5, 3])
    moved = torch.zeros_like(host)
    setattr(moved, copies._COPIED, (host, host._version, moved._version))
    assert copies.on_host(moved) is host
    mask = attention_mask(moved, moved, window=None)
    assert isinstance(mask, MaskedRows) and len(mask.table) == 2
    moved[:] = torch.arange(8)
    assert copies.on_host(moved) is not host
    assert attention_mask(moved, moved, window=None) is None


def test_a_tensor_that_stays_where_it_is_has_no_copy() -> None:
    here = torch.arange(3)
    assert copies.to_device(here, torch.device("cpu")) is here
    assert not hasattr(here, copies._COPIED)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("sizes", [(64, 64), (48, 20), (192, 128)], ids=["equal", "odd", "latent"])
def test_cuda_packed_documents_are_those_of_the_cpu(window: int | None, sizes: tuple[int, int]) -> None:
    """bf16 in one launch against fp32 on the host, with gradients; nothing waits for the device."""
    lengths = [1400, 790, 10]
    mask = Mask.documents(lengths, window=window)
    device = torch.device("cuda")
    results = []
    for where, dtype in ((device, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        torch.manual_seed(0)
        drawn = [torch.randn(1, TOKENS, heads, size) for heads, size in ((4, sizes[0]), (2, sizes[0]), (2, sizes[1]))]
        leaves = [x.bfloat16().to(where, dtype).requires_grad_() for x in drawn]
        rows = MaskedRows(mask, 1, TOKENS, where)
        if where == device:
            torch.cuda.set_sync_debug_mode("error")
        try:
            out = rows.attend(*leaves)
            grads = torch.autograd.grad(out.float().square().sum(), leaves)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([x.float().cpu() for x in (out, *grads)])
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).norm() <= TOL_BF16 * theirs.norm()


@pytest.mark.parametrize("chosen", ["budget", "observe"])
def test_nor_under_a_budget_or_observe(chosen: str) -> None:
    ((largest, calls),) = pool(1).run(largest_under, chosen)
    assert calls >= 2
    assert largest < TOKENS * TOKENS
