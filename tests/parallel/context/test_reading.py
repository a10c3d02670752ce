"""What is read of a model for context parallelism: where it attends, and that nothing else mixes tokens; without ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.parallel.context import Doors, _reading
from meshkit.parallel.context._pattern import CAUSAL
from meshkit.parallel.context._reading import Call, Reader
from meshkit.program import Program, without_values
from tests.laws.parity.cases import mesh_for
from tests.world import pool

IDS = torch.empty(1, 8, dtype=torch.int64, device="meta")
CALL = Call((IDS,), {"position_ids": IDS}, 8)
WIDTH, VOCABULARY = 8, 11


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Decoder(nn.Module):
    """inside: a function of [rows, tokens, features] before attention."""

    def __init__(self, inside: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.attn, self.head = Attention(), nn.Linear(WIDTH, VOCABULARY)
        self.conv, self.inside = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH), inside

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])
        x = self.embed(input_ids) + self.positions(position_ids)
        return self.head(self.attn(self.inside(x)))


def read(model: nn.Module, call: Call = CALL, named: tuple[str, ...] = ()) -> Doors:
    return Reader(Program(without_values(model)), named).doors(call)


def test_attention_is_found_where_it_is_called() -> None:
    found = read(Decoder())
    assert replace(found, calls=None) == Doors(intercepted=("attn",))
    assert found.calls == (_reading.Attention("attn", heads=2, kv_heads=2, width=4, pattern=CAUSAL),)


ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm of features": lambda x: F.layer_norm(x, (WIDTH,)),
    "a softmax of features": lambda x: x.softmax(-1),
    "tokens before features and back": lambda x: x.mT.tanh().mT,
    "tokens as rows": lambda x: x.flatten(0, 1).relu().view_as(x),
    "the sum of features": lambda x: x * x.sum(-1, keepdim=True),
}
MIXED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a softmax of tokens": (lambda x: x * x.softmax(1), "_softmax"),
    "every other token": (lambda x: x + x[:, ::2].repeat_interleave(2, 1), "aten.add.Tensor"),
    "products of tokens": (lambda x: (x @ x.mT).tril() @ x, "aten.bmm.default"),
    "a part of the tokens": (lambda x: torch.cat([x[:, :4].tanh(), x[:, 4:]], 1), "aten.tanh.default"),
}  # fmt: skip


COUNTED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "the mean of tokens": (lambda x: x - x.mean(1, keepdim=True), "mean"),
    "the sum of tokens": (lambda x: x * x.sum(1, keepdim=True), "sum"),
    "counted positions": (lambda x: x + torch.arange(x.shape[1])[:, None], "arange"),
    "the number of tokens": (lambda x: x / x.shape[1], "div"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_lines_of_all_tokens_are_found(name: str) -> None:
    inside, operator = COUNTED[name]
    found = read(Decoder(inside)).counted
    assert operator in {called for each in found.values() for called, _ in each.calls}


@pytest.mark.parametrize("name", ALONE)
def test_what_treats_each_token_by_itself_is_proved(name: str) -> None:
    assert read(Decoder(ALONE[name])).intercepted == ("attn",)


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_is_refused_with_its_place(name: str) -> None:
    inside, operation = MIXED[name]
    with pytest.raises(PlanError, match="Decoder cannot be split by its tokens") as refused:
        read(Decoder(inside))
    assert operation in str(refused.value)
    assert "test_reading.py:" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_convolution_with_strides_is_refused() -> None:
    with pytest.raises(PlanError, match=r"aten.convolution.default at .*: it needs all of a dim"):
        read(Convolves())


class Convolves(Decoder):
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        strided = F.conv1d(F.pad(x.mT, (2, 0)), self.conv.weight, stride=2, groups=self.conv.groups)
        return self.head(self.attn(x + strided.repeat_interleave(2, -1)[..., : x.shape[1]].mT))


class CountsItself(Decoder):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


def test_positions_that_the_forward_counts_by_itself_are_those_of_a_ranks_tokens() -> None:
    assert [called for each in read(CountsItself()).counted.values() for called, _ in each.calls] == ["arange"]


def test_attention_that_is_not_named_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be split by its tokens"):
        read(AttendsTwice(), named=("attn",))
    assert read(AttendsTwice()).intercepted == ("more", "attn")


class AttendsTwice(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.more = Attention()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.attn(self.more(self.embed(input_ids))))


class OtherBelow(Decoder):
    """Another program for few tokens than for many."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        out = super().forward(input_ids, position_ids)
        return out if input_ids.shape[1] < self.limit else out * 2


def test_a_program_that_depends_on_the_number_of_tokens_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be split by its tokens"):
        read(OtherBelow(12))
    model = OtherBelow(100)  # alike on the few tokens of the proof
    reader = Reader(Program(without_values(model)))
    doors = reader.doors(CALL)
    reader.refuse_other_programs(doors, CALL, tokens=90, lengths=[45])
    with pytest.raises(
        PlanError, match=r"aten.mul.Tensor at test_reading.py:\d+: of 120 tokens it is run, and of 16 not"
    ):
        reader.refuse_other_programs(doors, CALL, tokens=120, lengths=[60])


@pytest.mark.parametrize(
    "inside",
    [
        lambda x: x * max(1.0, math.log(x.shape[1]) / math.log(24)),
        lambda x: x / max(32, x.shape[1]),
        lambda x: x.clamp(max=max(3, x.shape[1] // 20)),
    ],
)
def test_a_number_that_follows_the_number_of_tokens_is_refused(inside: Callable[[Tensor], Tensor]) -> None:
    reader = Reader(Program(without_values(Decoder(inside))))
    doors = reader.doors(CALL)  # alike on the few tokens of the proof
    reader.refuse_other_programs(doors, CALL, tokens=20, lengths=[10])
    with pytest.raises(PlanError, match="its values depend on the number of tokens"):
        reader.refuse_other_programs(doors, CALL, tokens=120, lengths=[60])


# --------------------------------------------------------------------------------------------------------- transformers


def tiny(kind: str) -> nn.Module:
    from tests.zoo import causal, judge
    from tests.zoo.exact import exact

    with judge.quiet(), exact():
        return causal.build(kind)


def test_patterns_of_layers_are_read() -> None:
    doors = read(tiny("llama4_text"))
    assert doors.registry
    assert sorted(set(map(str, doors.patterns.values()))) == ["causal", "causal chunk=4"]


@pytest.mark.parametrize(
    ("kind", "operation"),
    [("mamba", "aten.convolution.default"), ("xlnet", "aten.bmm.default"), ("phimoe", "draws random numbers")],
)
def test_a_model_of_transformers_that_mixes_tokens_is_refused(kind: str, operation: str) -> None:
    with pytest.raises(PlanError, match=operation):
        read(tiny(kind))


def test_padding_is_proved_as_the_model_alone_takes_it() -> None:
    padded = Call((IDS,), {"position_ids": IDS}, 8, frozenset({"input_ids", "attention_mask"}))
    opt = Reader(Program(without_values(tiny("opt"))))
    doors = opt.doors(CALL)
    with pytest.raises(PlanError, match="aten.cumsum.default"):  # its positions count tokens that are no padding
        opt.prove(doors, padded)
    llama = Reader(Program(without_values(tiny("llama"))))
    llama.prove(llama.doors(CALL), padded)


# ------------------------------------------------------------------------------------------------- numbers among arguments


class OnNumber(Decoder):
    """From a number on it mixes tokens."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, step: int = 0) -> Tensor:
        out = super().forward(input_ids, position_ids)
        return out.cumsum(1) if step > 100 else out


def losses_by_step(steps: list[int]) -> list[float | str]:
    """Differences of the loss from one device's, or what is raised."""
    torch.manual_seed(0)
    alone = OnNumber().double()
    run = mk.parallelize(deepcopy(alone), mesh_for("cp=2"))
    ids = torch.arange(32).view(2, 16) % VOCABULARY
    batch = {"input_ids": ids, "labels": ids}
    found: list[float | str] = []
    for step in steps:

        def loss_at(model: nn.Module, batch: dict[str, Tensor], step: int = step) -> Tensor:
            logits = model(
                batch["input_ids"], **{k: batch[k] for k in ("position_ids", "mask") if k in batch}, step=step
            )
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

        try:
            loss = run.forward_backward(batch, loss=loss_at)
            found.append(abs(loss.item() - loss_at(alone, batch).item() / 32))
        except mk.MeshkitError as error:
            found.append(str(error))
    return found


def test_what_runs_from_a_number_on_is_proved_before_it_runs() -> None:
    for early, later, last in pool(2).run(losses_by_step, [0, 7, 101]):
        assert isinstance(early, float)
        assert isinstance(later, float)
        assert max(early, later) < 1e-12
        assert "aten.cumsum" in str(last)
