"""Law: gradients with offload are bit-identical to those without, whatever is saved and in whatever order it is needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import meshkit as mk
from meshkit.memory.offload import Offload, bytes_on_device, offload_of
from meshkit.models import Llama
from tests.depth import DEEP, covering
from tests.memory.late_streams import LateStreams
from tests.tiny import tiny_config

LAYERS = 4
BLOCKS = [f"layers.{index}" for index in range(LAYERS)]
CONFIG = tiny_config(vocab_size=64, hidden_size=32, intermediate_size=44, num_hidden_layers=LAYERS, head_dim=8)


def llama(dtype: torch.dtype = torch.float32) -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG).to(dtype)


def offloaded(model: nn.Module, blocks: list[str] = BLOCKS, **policy: Any) -> tuple[nn.Module, Offload]:
    """With copies as late as they may be, unless to disk."""
    mk.offload_activations(model, blocks=blocks, policy=mk.strategy.ActivationOffload(**{"min_bytes": 1, **policy}))
    offload = offload_of(model)
    assert offload is not None
    return model, offload


def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshkit.memory.offload._apply.streams_of", lambda device: LateStreams())


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    loss(model).backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def token_loss(model: nn.Module) -> Tensor:
    ids = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def nothing_left(offload: Offload) -> bool:
    """Call it when the graph is gone."""
    gc.collect()
    offload.end_step()
    arenas = [offload.tier.space.arena] if hasattr(offload.tier, "space") else [offload.tier.files.arena]
    if hasattr(offload.tier, "files"):
        offload.tier.threads.shutdown(wait=True)
        offload.tier.tidy()
        arenas.append(offload.tier.memory.arena)
    return not offload._saved and not offload._leaving and not any(arena.used_bytes for arena in arenas)


# ------------------------------------------------------------------------------------------------ transformers


WAYS = {
    "mode": ["none", "full", "selective"],
    "policy": [{}, {"to": "disk"}, {"keep_last": 0, "ahead": 2}, {"min_bytes": 3000, "ahead": 0}],
    "dtype": [torch.float32, torch.float64, torch.bfloat16],
}
PAIRS = [tuple(row.values()) for row in covering(WAYS)]


@pytest.mark.parametrize(("mode", "policy", "dtype"), list(product(*WAYS.values())) if DEEP else PAIRS, ids=str)
def test_gradients_are_bit_identical(
    dtype: torch.dtype, policy: dict, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late(monkeypatch)
    expected = gradients(mk.recompute(llama(dtype), blocks=BLOCKS, mode=mode), token_loss)
    model, offload = offloaded(mk.recompute(llama(dtype), blocks=BLOCKS, mode=mode), **policy)
    for _ in range(2):
        assert same(gradients(model, token_loss), expected)
    offload.end_step()
    step = offload.last_step
    assert step.stored_bytes == step.fetched_bytes + step.forwarded_bytes > 0
    assert nothing_left(offload)


def saved_storages(model: nn.Module, blocks: list[str], mode: Any) -> int:
    """Bytes that the named blocks save, counted by hooks that know nothing of offload: each storage once, without those of
    parameters and of inputs that need no gradient."""
    mk.recompute(model, blocks=BLOCKS, mode=mode)
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor.detach()

    def enter(module: nn.Module, args: Any) -> None:
        own.update(
            arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and not arg.requires_grad
        )
        module.hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
        module.hooks.__enter__()

    for name in blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(lambda module, args, out: module.hooks.__exit__())
    token_loss(model)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in seen.items() if address not in own)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_each_storage_leaves_once_and_comes_back_once(mode: Any) -> None:
    expected = saved_storages(llama(), BLOCKS[:-1], mode)
    model, offload = offloaded(mk.recompute(llama(), blocks=BLOCKS, mode=mode))
    gradients(model, token_loss)
    offload.end_step()
    step = offload.last_step
    assert step.stored_bytes == step.fetched_bytes == expected > 0
    if mode == "full":  # the inputs of three blocks [3, 16, 32] and nothing else
        assert step.stored_bytes == 3 * (3 * 16 * 32 * 4) and step.storages == 3
    else:
        assert step.tensors > step.storages


def test_selective_moves_what_its_policy_keeps() -> None:
    """Of three blocks: q, k, v, o, gate, up, down, the attention and its logsumexp, the input."""
    model, offload = offloaded(mk.recompute(llama(), blocks=BLOCKS, mode="selective"))
    gradients(model, token_loss)
    offload.end_step()
    tokens, heads, kv = 3 * 16, 4, 2
    values = 32 + 3 * 32 + 2 * kv * 8 + heads * 8 + heads + 2 * 44  # input; q, o, down; k, v; attention; lse; gate, up
    assert offload.last_step.stored_bytes == 3 * tokens * values * 4


def test_pools_do_not_grow_and_the_numbers_are_those_of_the_step() -> None:
    for policy in ({}, {"to": "disk"}):
        model, offload = offloaded(llama(), **policy)
        seen = []
        for _ in range(4):
            gradients(model, token_loss)
            offload.end_step()
            arena = offload.tier.space.arena if "to" not in policy else offload.tier.files.arena
            peak = arena.peak_bytes if "to" not in policy else None  # staging's depends on how fast the disk is
            seen.append((arena.total_bytes, peak, offload.last_step.stored_bytes))
        assert len(set(seen)) == 1
        assert offload.last_step.peak_bytes >= offload.last_step.stored_bytes
        assert set(offload.last_step.scalars()) == {
            f"offload/{name}" for name in ("stored_mib", "fetched_mib", "peak_mib", "waited_s")
        }
        assert ("host memory" if "to" not in policy else "O_DIRECT") in offload.report()
        assert nothing_left(offload)


# --------------------------------------------------------------------------------------------- odd models and calls


class Double(torch.autograd.Function):
    """Saves its output, an input, and something neither in nor out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * 2
        ctx.save_for_backward(x, out, x.sum(-1).exp())
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out, middle = ctx.saved_tensors
        return grad * 2 + out.sin() + x + middle.unsqueeze(-1)


class Odd(nn.Module):
    """Views, in-place results, tuples and keywords."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.register_buffer("scale", torch.rand(size))

    def forward(self, pair: tuple[Tensor, Tensor], *, gate: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        x, side = pair
        q, k, v = self.linear(x).chunk(3, dim=-1)  # three views of one storage
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed = F.dropout(scores @ v, 0.3).exp_()
        mixed = Double.apply(mixed.transpose(0, 1).contiguous().transpose(0, 1)) * table[:, : x.shape[-1]] * self.scale
        flat = mixed.flatten()[1:-1].sigmoid_()
        return self.out(mixed * gate) + flat.mean(), side * gate.expand_as(side)


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Odd(6) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        gate, table = self.gate(x).tanh(), torch.arange(80.0).reshape(1, 80) / 80
        pair = x, x * 2
        for layer in self.layers:
            pair = layer(pair, gate=gate, table=table)
        return (pair[0] * pair[1]).sum()


def odds() -> Odds:
    torch.manual_seed(2)
    return Odds()


def odd_loss(model: nn.Module) -> Tensor:
    return model(torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("policy", [{}, {"to": "disk"}, {"keep_last": 0}])
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_tuples_keywords_views_and_dropout(policy: dict, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    expected = gradients(mk.recompute(odds(), blocks=BLOCKS, mode=mode), odd_loss)
    model, offload = offloaded(mk.recompute(odds(), blocks=BLOCKS, mode=mode), **policy)
    assert same(gradients(model, odd_loss), expected)
    offload.end_step()
    if (
        mode == "full" and not policy
    ):  # x and its side, which need no gradient in the first block, and once for all the gate
        assert offload.last_step.storages == 5
    assert nothing_left(offload)


def test_views_come_back_with_their_strides() -> None:
    seen: list[tuple[Any, Any]] = []

    class Views(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            views = [x.t(), x[1:, ::2], x[:1].expand(4, 6), x.as_strided((2, 2), (1, 7), 3)]
            ctx.save_for_backward(*views)
            ctx.views = [(view.clone(), view.stride(), view.storage_offset()) for view in views]
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            assert len({view.untyped_storage().data_ptr() for view in ctx.saved_tensors}) == 1
            for view, (values, stride, offset) in zip(ctx.saved_tensors, ctx.views, strict=True):
                assert torch.equal(view, values) and (view.stride(), view.storage_offset()) == (stride, offset)
                seen.append((stride, offset))
            return grad

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Views.apply(x * 3)

    model, offload = offloaded(nn.Sequential(Block()), ["0"], keep_last=0)
    x = torch.randn(5, 6, requires_grad=True)
    model(x).sum().backward()
    offload.end_step()
    assert len(seen) == 4 and (offload.last_step.storages, offload.last_step.tensors) == (1, 4)
    assert offload.last_step.stored_bytes == 5 * 6 * 4


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def changes_after(x: Tensor) -> Tensor:
    hidden = x * 2
    out = hidden.sin()
    hidden.add_(1)
    return out


def changes_through_a_view(x: Tensor) -> Tensor:
    hidden = x * 2
    out = hidden.sin()
    hidden[0].zero_()
    return out


@pytest.mark.parametrize("policy", [{}, {"to": "disk"}, {"min_bytes": 10**6}], ids=str)
@pytest.mark.parametrize("change", [changes_after, changes_through_a_view])
def test_what_is_changed_in_place_is_found_out(policy: dict, change: Any) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        change(x).sum().backward()
    model, offload = offloaded(nn.Sequential(Block(change)), ["0"], keep_last=0, **policy)
    with pytest.raises(
        mk.errors.OffloadError, match=r"shape \(8, 8\).*was changed in place.*saved at version 0.*at version 1"
    ):
        model(x).sum().backward()
    assert nothing_left(offload)


class Saves(torch.autograd.Function):
    """Needs what it saves only if `reads`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reads: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.reads = reads
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0] if ctx.reads else grad, None


def test_a_storage_saved_again_after_a_change_is_moved_again() -> None:
    def function(x: Tensor) -> Tensor:
        hidden = x * 2
        first = Saves.apply(hidden, False)
        hidden.mul_(3)
        return first + Saves.apply(hidden, True)

    x = torch.randn(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    model, offload = offloaded(nn.Sequential(Block(function)), ["0"], keep_last=0)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    offload.end_step()
    assert torch.equal(found, expected) and offload.last_step.storages == 2


@pytest.mark.parametrize("policy", [{}, {"to": "disk"}])
def test_a_second_backward_and_a_gradient_of_gradients(policy: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    plain = llama()
    model, offload = offloaded(llama(), **policy)
    for each in (plain, model):
        loss = token_loss(each)
        loss.backward(retain_graph=True)
        loss.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])

    def penalty(module: nn.Module, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    def block(x: Tensor) -> Tensor:
        return (x.sin() @ x.t()).tanh()

    x = torch.randn(6, 6, requires_grad=True)
    twice, _ = offloaded(nn.Sequential(Block(block), Block(block)), ["0", "1"], keep_last=0, **policy)
    assert torch.equal(penalty(twice, x), penalty(nn.Sequential(Block(block), Block(block)), x))
    del loss
    assert nothing_left(offload)


@pytest.mark.parametrize("policy", [{}, {"to": "disk"}])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_three_microbatches_in_flight(policy: dict, order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    results = []
    for build in (llama, lambda: offloaded(llama(), **policy)[0]):
        model = build()
        losses = [
            model(torch.randint(0, 64, (rows, 8), generator=torch.Generator().manual_seed(rows))).square().mean()
            for rows in (1, 4, 2)
        ]
        for index in order:
            losses[index].backward()
        results.append([param.grad for param in model.parameters()])
    assert same(*results)


def test_the_same_block_twice_and_a_block_in_a_block() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())
            self.outer = nn.Sequential(self.inner, nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(self.outer(x))).sum()

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(3)))

    model, offload = offloaded(Twice(), ["outer", "inner"], keep_last=0)
    assert same(gradients(model, loss), gradients(Twice(), loss))
    assert nothing_left(offload)


# --------------------------------------------------------------------------------------------------- nothing stays


@pytest.mark.parametrize("policy", [{}, {"to": "disk"}])
def test_nothing_leaks(policy: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    late(monkeypatch)
    model, offload = offloaded(llama(), **policy)
    with torch.no_grad():
        model(torch.zeros(2, 8, dtype=torch.long))
    offload.end_step()
    assert offload.last_step.storages == 0  # nothing is saved, so nothing moves

    for _ in range(3):
        token_loss(model)  # without a backward
    expected = gradients(llama(), token_loss)

    def fail(*args: Any) -> None:
        raise ValueError("in the middle")

    handle = model.layers[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        token_loss(model)
    handle.remove()
    out = model(torch.zeros(2, 8, dtype=torch.long))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        out.sum().backward()
    del out
    inner = model.layers[1].mlp.register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        token_loss(model).backward()
    inner.remove()
    assert same(gradients(model, token_loss), expected)
    assert nothing_left(offload)


def test_the_device_copy_goes_when_it_has_left() -> None:
    """What a block saves is gone at once where copies are done at once; with late copies, two blocks later."""

    class Watched(nn.Module):
        def __init__(self, seen: list[Any]) -> None:
            super().__init__()
            self.seen = seen

        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            self.seen.append(StorageWeakRef(hidden.untyped_storage()))
            return hidden.sin() + 1

    for streams, alive in ((None, [0] * 5), (LateStreams(), [0, 0, 0, 1, 1])):
        seen: list[Any] = []
        model = nn.Sequential(*(Watched(seen) for _ in range(5)))
        with pytest.MonkeyPatch.context() as patch:
            if streams is not None:
                patch.setattr("meshkit.memory.offload._apply.streams_of", lambda device, streams=streams: streams)
            _, offload = offloaded(model, [str(index) for index in range(5)], keep_last=0)
        out = model(torch.randn(64, 64, requires_grad=True)).sum()
        assert [int(not reference.expired()) for reference in seen] == alive
        out.backward()
        offload.end_step()
        assert all(reference.expired() for reference in seen)


# ------------------------------------------------------------------------------------------------------ prefetch


@pytest.mark.parametrize(("ahead", "behind"), [(0, 0), (1, 1), (2, 2)])
def test_blocks_are_fetched_in_reverse_order_ahead_of_their_backward(ahead: int, behind: int) -> None:
    model, offload = offloaded(llama(), ahead=ahead)
    begun: list[int] = []
    reached: dict[int, int] = {}
    fetch = offload._fetch
    scopes: dict[int, int] = {}

    def noted(saved: Any) -> Tensor:
        begun.append(scopes[id(saved)])
        return fetch(saved)

    offload._fetch = noted  # type: ignore[method-assign]
    for layer, module in enumerate(model.layers):
        module.mlp.down_proj.register_full_backward_pre_hook(
            lambda module, grad, layer=layer: reached.__setitem__(layer, min(begun, default=LAYERS))
        )
    out = model(torch.zeros(2, 8, dtype=torch.long))
    scope, index = offload._newest, LAYERS - 1
    while scope is not None:
        for reference in scope.storages:
            scopes[id(reference())] = index
        scope, index = scope.previous, index - 1
    out.sum().backward()
    assert begun == sorted(begun, reverse=True) and set(begun) == set(range(LAYERS - 1))
    for layer in range(LAYERS - 1):  # when backward is inside of a layer, the `ahead` before it are on their way
        assert reached[layer] == max(0, layer - behind)
    assert reached[LAYERS - 1] == (LAYERS - 1 - ahead if ahead else LAYERS)


# ------------------------------------------------------------------------------------------------- what stays


def test_parameters_buffers_and_tables_stay() -> None:
    moved: set[int] = set()
    model, offload = offloaded(odds(), keep_last=0)
    store = offload.tier.store

    def noted(source: Tensor) -> Any:
        moved.add(source.untyped_storage().data_ptr())
        return store(source)

    offload.tier.store = noted  # type: ignore[method-assign]
    loss = odd_loss(model)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert moved and not moved & own
    offload.end_step()
    assert 80 * 4 not in {saved.nbytes for saved in (reference() for reference in offload._saved.values()) if saved}
    loss.backward()


def test_the_prediction_of_what_stays_on_the_device() -> None:
    policy = mk.strategy.ActivationOffload(keep_last=1, ahead=1)
    assert bytes_on_device([10] * 8, policy) == 30  # the last, and two that leave
    assert bytes_on_device([10] * 8, mk.strategy.ActivationOffload(keep_last=0, ahead=3)) == 40
    assert bytes_on_device([7], policy) == 7
    assert bytes_on_device([], policy) == 0


# ------------------------------------------------------------------------------------------------------ refusals


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(mk.errors.PlanError, match="no block 'layers.9'"):
        mk.offload_activations(llama(), blocks=["layers.9"])
    with pytest.raises(mk.errors.PlanError, match="'layers.0' is offloaded already"):
        mk.offload_activations(offloaded(llama())[0], blocks=BLOCKS)
    with pytest.raises(mk.errors.PlanError, match="tensors of device 'meta' cannot be moved"):
        mk.offload_activations(llama().to("meta"), blocks=BLOCKS)
    with pytest.raises(mk.errors.PlanError, match="can wait on the 'host' or on 'disk'"):
        mk.strategy.ActivationOffload(to="nvme")  # type: ignore[arg-type]
    with pytest.raises(mk.errors.PlanError, match=r"ahead=-1\): use at least 0"):
        mk.strategy.ActivationOffload(ahead=-1)
    with pytest.raises(mk.errors.PlanError, match='Give to="disk" too'):
        mk.strategy.ActivationOffload(folder=tmp_path)


def test_a_compiled_module_around_the_blocks_is_refused() -> None:
    model, _ = offloaded(nn.Sequential(Block(torch.sin), Block(torch.cos)), ["0", "1"])
    with pytest.raises(Exception, match="Compile the blocks"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(3, requires_grad=True))
    torch._dynamo.reset()
