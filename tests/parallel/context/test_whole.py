"""Modules that mix tokens otherwise than by attention: refused, or run on all tokens where it was asked for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core.sharding import full_tensor
from meshkit.errors import PlanError
from meshkit.mesh import MeshSpec
from meshkit.parallel.context import notes_of, refuse_whole_tokens
from meshkit.parallel.context._whole import gather_tokens, own_tokens
from meshkit.preflight.explain import Message
from meshkit.program import read_program
from meshkit.resolve import resolve
from meshkit.strategy import Strategy
from tests.laws.parity.cases import TOKENS as BYTES_TOKENS
from tests.laws.parity.cases import mesh_for
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.parallel.context.test_modules import TOKENS, VOCAB, OwnAttention, OwnBlock, OwnModel
from tests.world import pool
from tests.zoo import causal
from tests.zoo.shrink import VOCABULARY

TOL = 1e-10


class Smoothed(nn.Module):
    """Reads what all tokens are, in shares that a row makes: no line that a rank could run by itself. Its tokens are the last
    dim."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1) * x


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.smoothed = nn.Linear(16, 16), Smoothed()

    def forward(self, x: Tensor) -> Tensor:
        return self.smoothed(x.mT).mT * self.gate(x).sigmoid()


class Centred(nn.Module):
    """Reads the mean of a row, and a weight of each token beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor, *, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(x - x.mean(1, keepdim=True))) * weight
        return self.down(hidden), hidden.cumprod(1)


class Hybrid(OwnBlock):
    def __init__(self) -> None:
        super().__init__(causal=True)
        self.mixer, self.centred = Mixer(), Centred()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        x = super().forward(x)
        out, sums = self.centred(x, weight=x[..., :1].sigmoid())
        return x + out + sums[..., :16] / 9


class AttentionOfCentred(OwnAttention):
    """Attends to what it has mixed itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class Attending(OwnBlock):
    def __init__(self) -> None:
        super().__init__(causal=True)
        self.other = AttentionOfCentred(causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.other(x))


class HybridModel(OwnModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hybrid(), Attending()])


PLAN = mk.Plan(blocks=("blocks.*",), attention=("blocks.*.attn", "blocks.*.other"))


def model_and_batch() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = HybridModel().double()
    ids = torch.randint(0, VOCAB, (4, TOKENS + 1))
    return model, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def error_of_a_run(mesh: str, recompute: str) -> float:
    one, batch = model_and_batch()
    F.cross_entropy(one(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()).backward()
    expected = {name: param.grad for name, param in one.named_parameters()}
    model, batch = model_and_batch()
    run = mk.parallelize(
        model,
        mesh_for(mesh),
        plan=None if "tp" in mesh else PLAN,
        unproved="replicate",
        memory=mk.MemoryPolicy(recompute=recompute),
    )
    own = {name: x.tensor_split(run.mesh.data_ranks)[run.mesh.data_rank] for name, x in batch.items()}
    run.forward_backward(own, microbatches=2)
    return max(float((full_tensor(p.grad) - expected[name]).abs().max()) for name, p in run.named_parameters())


@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        ("cp=2", "none"),
        ("cp=2", "full"),
        ("cp=4", "none"),
        ("dp_shard=2 cp=2", "full"),
        ("cp=2 tp=2", "none"),
        ("pp=2 cp=2", "none"),
    ],
)
def test_a_hybrid_equals_one_device(mesh: str, recompute: str) -> None:
    ranks = 2 if mesh == "cp=2" else 4
    assert max(pool(ranks).run(error_of_a_run, mesh, recompute)) < TOL


def rows_end_to_end() -> float:
    """The largest difference, in values and gradients, of rows that are laid end to end from themselves."""
    model, batch = model_and_batch()
    axis = mesh_for("cp=2")["cp"]
    mk.context_parallel(model, axis, attention=PLAN.attention, unproved="replicate")
    hidden = torch.arange(TOKENS) < torch.tensor([TOKENS, TOKENS - 1, 5, TOKENS])[:, None]
    batch["labels"] = batch["labels"].where(hidden, -100)
    values = torch.randn(4, TOKENS, 3, dtype=torch.float64)
    split = mk.split_batch(model, {**batch, "attention_mask": hidden.long(), "values": values})
    mask = split["mask"]
    assert mask.rows == 4
    own = split["values"].movedim(1, 2).requires_grad_()
    everything = gather_tokens(own, 2, mask)
    worst = float((everything.detach().movedim(2, 1) - values).abs().max())
    mine = own_tokens(everything.square(), 2, mask)
    real = sum(after - first for first, after in mask.layout.runs[mask.rank])  # the rest is padding
    mine[..., :real].sum().backward()
    return max(worst, float((own.grad - 2 * own.detach())[..., :real].abs().max()))


def test_rows_end_to_end_are_gathered_as_rows() -> None:
    assert max(pool(2).run(rows_end_to_end)) == 0.0


def test_without_being_asked_it_is_refused() -> None:
    program = read_program(model_and_batch()[0])
    with pytest.raises(PlanError, match=r"blocks.0.mixer.smoothed: aten._softmax"):
        resolve(program, Strategy(plan=PLAN), MeshSpec(cp=2))
    resolved = resolve(program, Strategy(plan=PLAN, unproved="replicate"), MeshSpec(cp=2))
    doors = resolved.reading[1]
    assert notes_of(doors.whole, 2)[0].startswith(
        "cp=2: every rank runs blocks.0.mixer.smoothed on all tokens: blocks.0.mixer.smoothed: aten._softmax"
    )
    assert list(doors.whole) == ["blocks.0.mixer.smoothed", "blocks.0.centred", "blocks.1.other"]
    with pytest.raises(PlanError, match=r"'blocks.0.mixer.smoothed' would run on all tokens .* sequence=False"):
        refuse_whole_tokens(doors)


class WithSmoothed(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.smoothed = mlp, Smoothed()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.smoothed(x.mT).mT)


def observed(recompute: str, frozen: bool) -> tuple[Counter[Message], Counter[Message]]:
    torch.manual_seed(0)
    model = causal.build("llama")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp = WithSmoothed(layer.mlp)  # type: ignore[union-attr]
    if frozen:  # nothing before the first of them trains
        model.model.embed_tokens.requires_grad_(False)  # type: ignore[union-attr]
        model.model.layers[0].self_attn.requires_grad_(False)  # type: ignore[union-attr,index]
        model.model.layers[0].input_layernorm.requires_grad_(False)  # type: ignore[union-attr,index]
        model.model.layers[0].post_attention_layernorm.requires_grad_(False)  # type: ignore[union-attr,index]
    plan = mk.Plan(tensor={"**.self_attn": mk.plan.attention()}, blocks=("model.layers.*",))
    run = mk.parallelize(
        model, mesh_for("cp=2"), plan=plan, unproved="replicate", memory=mk.MemoryPolicy(recompute=recompute)
    )
    ids = torch.arange(2 * BYTES_TOKENS).view(2, -1) % VOCABULARY
    return seen_and_said(run, {"input_ids": ids, "labels": ids}, microbatches=1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_gathered_is_explained(recompute: str, frozen: bool) -> None:
    assert_alike(pool(2).run(observed, recompute, frozen))


class OfAll(OwnModel):
    """Mixes tokens where no module around it is less than the model."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, position_ids).cumprod(1)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OfAll()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.inner(input_ids, position_ids)


def test_a_whole_model_is_not_run_on_all_tokens() -> None:
    strategy = Strategy(unproved="replicate")
    for model in (OfAll(), Nested()):
        with pytest.raises(PlanError, match="aten.cumprod"):
            resolve(read_program(model), strategy, MeshSpec(cp=2))
