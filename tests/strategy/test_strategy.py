"""A strategy is data: refused where it makes no sense, the same from a file, and the same from every verb."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshkit as mk
from meshkit.errors import PlanError
from meshkit.memory import Treatment
from meshkit.mesh import MeshSpec
from meshkit.models import LLAMA_PLAN, Llama
from meshkit.parallel.pipeline.schedules import one_f_one_b
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve
from meshkit.resolve._refusals import refuse_backend
from meshkit.strategy import (
    ActivationOffload,
    BlockOverride,
    BlockTopK,
    Budget,
    Capacity,
    ChunkedLoss,
    ContextPolicy,
    DataPolicy,
    ExpertPolicy,
    Fp8,
    MemoryPolicy,
    OptimizerOffload,
    OptimizerPolicy,
    PipelinePolicy,
    Precision,
    Recompute,
    Sparse,
    Strategy,
    VerticalSlash,
)
from tests.laws.parity.cases import Cell, build, mesh_for
from tests.tiny import tiny_config
from tests.world import pool

EVERYTHING = Strategy(
    mesh="pp=2 tp=2",
    plan=mk.Plan(tensor={"a.*": mk.plan.column(), "b": mk.plan.column(group=4)}, blocks=("layers.*",)),
    memory=MemoryPolicy(
        recompute=Budget(bytes=100, rows=2, seq_len=4),
        offload=ActivationOffload(to="disk", folder=Path("x")),
        precision=Precision(reduce=torch.float64, fp8=Fp8(emulate=True)),
        loss=ChunkedLoss(),
        optimizer=OptimizerPolicy(offload=OptimizerOffload(resident=0.5)),
    ),
    zero=2,
    data=DataPolicy(gather="fp8", reduce="int4", feedback=False),
    sequence=True,
    context=ContextPolicy(scheme="ring", slack=0.1),
    experts=ExpertPolicy(capacity=Capacity(factor=1.5), copies=0),
    pipeline=PipelinePolicy(schedule="zb-h1", stages=(1, 2)),
    microbatches=4,
    compile="aot_eager",
    unproved="replicate",
    overrides={
        "layers.0": BlockOverride(recompute="full"),
        "layers.1": BlockOverride(recompute=Recompute(mode="selective", keep=("matmul",)), offload=False),
    },
)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Strategy)])
def test_every_choice_comes_back_from_toml(name: str) -> None:
    one = Strategy(**{name: getattr(EVERYTHING, name)})
    assert one != Strategy(), "the choice is not at its default"
    assert Strategy.from_toml(one.to_toml()) == one


def test_all_choices_at_once_go_through_a_file(tmp_path: Path) -> None:
    EVERYTHING.write(tmp_path / "run.toml")
    assert Strategy.read(tmp_path / "run.toml") == EVERYTHING
    assert Strategy().to_toml() == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("zeros = 1", "run.toml: Strategy has no 'zeros'. Did you mean 'zero'?"),
        ("zero = 'two'", "run.toml: zero: 'two' should be int"),
        ("zero = true", "run.toml: zero: True should be int"),
        ("memory = 3", "run.toml: memory: 3 should be a table of MemoryPolicy"),
        ("[memory]\nprecision = {compute = 'bf61'}", "run.toml: memory: precision: compute: 'bf61' is no dtype"),
        ("unproved = 'bla'", r"Strategy\(unproved='bla'\): choose one of refuse, replicate"),
        ("[memory]\nrecompute = 'bla'", r"MemoryPolicy\(recompute='bla'\): choose one of"),
        ("[memory.recompute]\nbytes = 3", "run.toml: memory: recompute: Budget needs rows, seq_len"),
        ("mesh = 'tq=2'", "there is no axis 'tq'"),
        ("x =", "run.toml: this is no TOML"),
        ("overrides = 1", "run.toml: overrides: 1 should be a table"),
        ("memory = []", r"run.toml: memory: \[\] should be a table of MemoryPolicy"),
        ("mesh = ['tp=2']", "run.toml: mesh: .* should be str"),
        ("[pipeline]\nstages = 2", "run.toml: pipeline: stages: 2 should be a list"),
        ("[pipeline]\nstages = '22'", "run.toml: pipeline: stages: '22' should be a list"),
        ("[pipeline]\nstages = [2, 2.5]", r"run.toml: pipeline: stages\[1\]: 2.5 should be int"),
        ("[plan]\nblocks = 'layers.*'", r"run.toml: plan: blocks: 'layers.\*' should be a list"),
        ("[plan]\ntensor = {a = 1}", r"run.toml: plan: tensor\['a'\]: 1 should be"),
        ("[plan]\ntensor = {a = 'colum'}", r"Style\('colum'\): choose one of column"),
        ("[experts]\ndispatcher = 'mine'", "run.toml: experts: dispatcher: 'mine' is nothing that a file can say"),
        ("[memory.offload]\nto = 'disk'\nfolder = 1", "run.toml: memory: offload: folder: 1 should be a text, a path"),
    ],
)
def test_a_wrong_file_is_named_with_the_place_in_it(text: str, error: str) -> None:
    with pytest.raises(mk.MeshkitError, match=error):
        Strategy.from_toml(text, source="run.toml")


def test_a_list_for_a_tuple_and_a_text_for_a_path_come_back_too(tmp_path: Path) -> None:
    memory = MemoryPolicy(
        recompute=Recompute(mode="selective", keep=["matmul"]),  # type: ignore[arg-type]
        offload=ActivationOffload(to="disk", folder=str(tmp_path)),
    )
    assert Strategy.from_toml(Strategy(memory=memory).to_toml()) == Strategy(memory=memory)
    (tmp_path / "latin.toml").write_bytes(b"# \xff")
    with pytest.raises(mk.errors.PlanError, match=r"latin.toml: this is no TOML"):
        Strategy.read(tmp_path / "latin.toml")


@pytest.mark.parametrize("sparse", [BlockTopK(block=64, top=16), VerticalSlash(block=64, vertical=8, slash=8)])
def test_a_choice_of_blocks_comes_back_from_toml_as_its_kind(sparse: Sparse) -> None:
    one = Strategy(context=ContextPolicy(sparse=sparse))
    assert Strategy.from_toml(one.to_toml()) == one


def test_what_is_no_data_cannot_be_written() -> None:
    with pytest.raises(mk.errors.PlanError, match=r"PipelinePolicy.schedule=<function .*write_csv"):
        Strategy(pipeline=PipelinePolicy(schedule=lambda ranks, microbatches: None)).to_toml()
    with pytest.raises(mk.errors.PlanError, match="ExpertPolicy.dispatcher=.* only data can"):
        Strategy(experts=ExpertPolicy(dispatcher=lambda experts, mesh: None)).to_toml()
    with pytest.raises(mk.errors.PlanError, match="there is no file"):
        Strategy.read("nowhere.toml")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Strategy(microbatches=0), "microbatches=0"),
        (lambda: Strategy(memory="full"), r"Strategy\(memory='full'\): give MemoryPolicy"),  # type: ignore[arg-type]
        (lambda: Strategy(plan={"up": 1}), r"Strategy\(plan=a dict\): give Plan or None. For example, Plan\(tensor="),  # type: ignore[arg-type]
        (
            lambda: Strategy.of(None, {"recompute": "full"}),
            r"no choice 'recompute'. It is one of a policy's: memory=MemoryPolicy\(recompute=...\)",
        ),
        (lambda: Strategy(zero=True), r"Strategy\(zero=True\): give int or None"),
        (lambda: Strategy(sequence="no"), r"Strategy\(sequence='no'\): give bool"),  # type: ignore[arg-type]
        (lambda: Strategy(overrides={"a": "full"}), "which is no BlockOverride. Give a BlockOverride"),  # type: ignore[dict-item]
        (lambda: PipelinePolicy(stages=("2", "2")), "whole numbers"),  # type: ignore[arg-type]
        (lambda: Strategy.of("run.toml", {}), "this is no Strategy"),  # type: ignore[arg-type]
        (lambda: BlockOverride(), "changes nothing"),
        (lambda: BlockOverride(recompute="some"), "mode='some'"),  # type: ignore[arg-type]
        (lambda: Strategy.of(None, {"zerro": 1}), "no choice 'zerro'. Did you mean 'zero'"),
        (lambda: Strategy.of(Strategy(), {"zero": 1}), "a strategy and zero as well"),
    ],
)
def test_odd_choices_are_refused(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=error):
        make()


# ------------------------------------------------------------------------------------------------------- resolve


def resolved(strategy: Strategy, spec: str = "", layers: int = 3) -> Resolved:
    model = build(Cell(mesh="", layers=layers))
    plain = dataclasses.replace(strategy, plan=LLAMA_PLAN)
    parsed = mk.MeshSpec.parse(spec)
    return resolve(read_program(model), plain, parsed.resolve(parsed.world_size))


def test_resolving_changes_nothing() -> None:
    model = build(Cell(mesh="", layers=4))
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    strategy = Strategy(
        plan=LLAMA_PLAN,
        sequence=True,
        memory=MemoryPolicy(recompute="selective", loss=ChunkedLoss(), offload=ActivationOffload()),
        pipeline=PipelinePolicy(schedule="zbv"),
    )
    resolve(read_program(model), strategy, mk.MeshSpec(pp=2, cp=2, tp=2))
    assert {name: (type(module), dict(vars(module))) for name, module in model.named_modules()} == before


def test_overrides_change_their_blocks_and_no_others() -> None:
    found = resolved(
        Strategy(
            memory=MemoryPolicy(recompute="selective", offload=ActivationOffload(keep_last=0)),
            overrides={"layers.0": BlockOverride(recompute="full", offload=False)},
        )
    ).treatments
    selective = Recompute(mode="selective")
    assert found == {
        "layers.0": Treatment(Recompute(mode="full"), offload=False),
        "layers.1": Treatment(selective, offload=True),
        "layers.2": Treatment(selective, offload=True),
    }


@pytest.mark.parametrize(
    ("strategy", "error"),
    [
        (Strategy(overrides={"layer.0": BlockOverride(recompute="full")}), "matches no block. The nearest"),
        (Strategy(overrides={"layers.0": BlockOverride(offload=True)}), "nothing says where to"),
        (
            Strategy(
                memory=MemoryPolicy(offload=ActivationOffload()), overrides={"layers.2": BlockOverride(offload=True)}
            ),
            "keep_last=...\\) keeps it",
        ),
        (
            Strategy(
                memory=MemoryPolicy(recompute=Budget(bytes=10**9, rows=1, seq_len=8)),
                overrides={"layers.2": BlockOverride(recompute="full")},
            ),
            "the budget chooses for every block",
        ),
        (
            Strategy(memory=MemoryPolicy(mlp_chunks=2), overrides={"layers.0": BlockOverride(recompute="selective")}),
            "mlp_chunks=2 with recompute='selective'",
        ),
        (Strategy(mesh="tp=2"), "the strategy is for the mesh tp=2, but this one is of one rank"),
    ],
)
def test_what_a_strategy_cannot_have_together_is_refused(strategy: Strategy, error: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=error):
        resolved(strategy)


def trained(overrides: dict[str, BlockOverride]) -> list[torch.Tensor]:
    run = mk.parallelize(build(Cell(mesh="", layers=3)), mesh_for("dp_shard=2"), plan=LLAMA_PLAN, overrides=overrides)
    ids = torch.arange(32).reshape(2, 16) % 61
    run.forward_backward({"input_ids": ids, "labels": ids.roll(-1, 1)})
    return [param.grad.to_local() for param in run.parameters()]  # type: ignore[union-attr]


def gradients_agree() -> bool:
    plain = trained({})
    other = trained({"layers.{0,2}": BlockOverride(recompute="full")})
    return all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))


def test_overridden_blocks_have_the_same_gradients() -> None:
    assert pool(2).run(gradients_agree) == [True, True]


def test_a_strategy_has_its_own_number_of_microbatches() -> None:
    assert pool(1).run(losses_by_microbatches) == [[True, True]]


def losses_by_microbatches() -> list[bool]:
    ids = torch.arange(64).reshape(4, 16) % 61
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    found = []
    for strategy in (Strategy(plan=LLAMA_PLAN, microbatches=3), Strategy(plan=LLAMA_PLAN)):
        run = mk.parallelize(build(Cell(mesh="", layers=1)), mesh_for(""), strategy)
        calls: list[int] = []
        run.model.register_forward_pre_hook(lambda module, args, calls=calls: calls.append(1))
        run.forward_backward(batch)
        found.append(len(calls) == (strategy.microbatches or 1))
    return found


# --------------------------------------------------------------------------------- the same refusal from every verb


def lora_with_dropout() -> tuple[nn.Module, mk.Plan]:
    model = llama()
    return model, mk.lora.attach(model, plan=LLAMA_PLAN, rank=2, dropout=0.1)


def llama(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    return Llama(tiny_config(vocab_size=64, hidden_size=64, intermediate_size=96, head_dim=16, **changed))


def on_meta() -> nn.Module:
    model = llama().to("meta")
    model.register_buffer("table", torch.empty(2, device="meta"))
    return model


def idle_stage() -> nn.Module:
    model = llama()
    model.requires_grad_(False)
    next(iter(model.get_submodule("layers.0").parameters())).requires_grad_(True)
    return model


def in_part_on_meta() -> nn.Module:
    model = llama()
    model.get_submodule("layers.0").to("meta")
    return model


EMULATED, GATHERED = Fp8(emulate=True), Fp8(emulate=True, gather=True)


def block_twice() -> Llama:
    model = llama()
    model.layers.append(model.layers[0])
    return model


def layer_twice() -> Llama:
    model = llama()
    model.layers[1].mlp.up_proj = model.layers[0].mlp.up_proj  # type: ignore[union-attr, index]
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str, dict[str, Any], str]] = {
    "fp8 with pp": (llama, "pp=2", {"memory": MemoryPolicy(precision=Precision(fp8=EMULATED))}, "fp8=...\\) with pp=2"),
    "fp8 gather with tp": (
        llama,
        "tp=2",
        {"memory": MemoryPolicy(precision=Precision(fp8=GATHERED))},
        "Fp8\\(gather=True\\) with tp=2",
    ),
    "fp8 gather with the optimizer on the host": (
        llama,
        "dp_shard=2",
        {
            "memory": MemoryPolicy(
                precision=Precision(fp8=GATHERED), optimizer=OptimizerPolicy(offload=OptimizerOffload())
            )
        },
        "with an optimizer on the host",
    ),
    "fp8 without its hardware": (
        llama,
        "dp_shard=2",
        {"memory": MemoryPolicy(precision=Precision(fp8=Fp8()))},
        "need an NVIDIA GPU",
    ),
    "a rank of pp that trains nothing": (idle_stage, "pp=2", {}, "pp rank 1 requires a gradient"),
    "dropout of adapters with mlp_chunks": (
        lora_with_dropout,
        "dp_shard=2",
        {"memory": MemoryPolicy(mlp_chunks=2)},
        "mlp_chunks=2 with lora",
    ),
    "dropout of adapters with compile": (lora_with_dropout, "dp_shard=2", {"compile": True}, "compile with lora"),
    "stochastic rounding of fp32": (
        llama,
        "dp_shard=2",
        {"memory": MemoryPolicy(optimizer=OptimizerPolicy(stochastic_rounding=True))},
        "rounds bf16 parameters",
    ),
    "a buffer on meta": (on_meta, "dp_shard=2", {}, "is on meta, and its value cannot be recovered"),
    "a model on meta in part": (in_part_on_meta, "dp_shard=2", {}, "some parameters are on meta and some not"),
    "ulysses that does not divide cp": (
        llama,
        "cp=2",
        {"context": ContextPolicy(scheme="ring", ulysses=3)},
        "ulysses=3 does not divide cp=2",
    ),
    "ep without experts": (llama, "dp_shard=2 ep=2", {}, "ep=2 etp=1, but the plan has no experts"),
    "zero with pp": (llama, "pp=2", {"zero": 3}, "zero=3 with pp"),
    "a typo in the plan on one rank of tp": (
        llama,
        "dp_shard=2",
        {"plan": mk.Plan(tensor={"layer.*.mlp": mk.plan.replicate()})},
        "matches no module",
    ),
    "a schedule for other microbatches": (
        llama,
        "pp=2",
        {"pipeline": PipelinePolicy(schedule=one_f_one_b(2, 2)), "microbatches": 4},
        "is for 2 ranks and 2 microbatches, but the run has 2 and 4",
    ),
    "an unknown compiler": (llama, "dp_shard=2", {"compile": "inducto"}, "compile='inducto' is no backend"),
    "a schedule that is no file": (
        llama,
        "pp=2",
        {"pipeline": PipelinePolicy(schedule="nowhere.csv")},
        "there is no file nowhere.csv",
    ),
    "a block that runs twice, on pp": (
        block_twice,
        "pp=2",
        {},
        "'layers.2' is the same module as the block 'layers.0'",
    ),
    "a layer of blocks of two stages": (
        layer_twice,
        "pp=2",
        {},
        "is the same parameter as 'layers.0.mlp.up_proj.weight'",
    ),
    "compiled mlp_chunks": (
        llama,
        "dp_shard=2",
        {"memory": MemoryPolicy(mlp_chunks=2), "compile": True},
        "mlp_chunks=2 with compile",
    ),
    "liger without a GPU": (
        llama,
        "dp_shard=2",
        {"memory": MemoryPolicy(loss=ChunkedLoss(backend="liger"))},
        "has kernels for GPUs",
    ),
}


class Own(nn.Module):
    """Somebody's model, whose plan names no blocks; `given` is one more parameter."""

    def __init__(self, given: torch.Tensor | None = None, *, layers: int = 0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        if layers:
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        if given is not None:
            self.given = nn.Parameter(given)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in getattr(self, "layers", ()):
            x = layer(x)
        return self.head(x)


def in_two_dtypes() -> nn.Module:
    model = llama()
    model.get_submodule("layers.1.mlp").to(torch.bfloat16)
    return model


NO_BLOCKS: dict[str, Any] = {"plan": None}

REFUSED |= {
    "a schedule without pp": (
        llama,
        "dp_shard=2",
        {"pipeline": PipelinePolicy(schedule="zb-h1")},
        r"PipelinePolicy\(schedule='zb-h1'\) on a mesh with pp=1",
    ),
    "stages without pp": (
        llama,
        "tp=2",
        {"pipeline": PipelinePolicy(stages=(1, 1))},
        r"PipelinePolicy\(stages=\(1, 1\)\) on a mesh with pp=1",
    ),
    "a capacity without experts": (
        llama,
        "dp_shard=2",
        {"experts": ExpertPolicy(capacity=Capacity(factor=1.0))},
        r"ExpertPolicy\(capacity=.*\), but the plan has no experts",
    ),
    "hot experts without experts": (
        llama,
        "dp_shard=2",
        {"experts": ExpertPolicy(copies=1)},
        "the plan has no experts",
    ),
    "recompute without blocks": (
        Own,
        "dp_shard=2",
        {**NO_BLOCKS, "memory": MemoryPolicy(recompute="full")},
        "recompute='full' is done block by block, but the plan names no blocks",
    ),
    "a budget without blocks": (
        Own,
        "dp_shard=2",
        {**NO_BLOCKS, "memory": MemoryPolicy(recompute=Budget(bytes=1, rows=1, seq_len=8))},
        "Budget.* is done block by block, but the plan names no blocks",
    ),
    "offload without blocks": (
        Own,
        "dp_shard=2",
        {**NO_BLOCKS, "memory": MemoryPolicy(offload=ActivationOffload())},
        "offload=.* but the plan names no blocks",
    ),
    "compile without blocks": (Own, "dp_shard=2", {**NO_BLOCKS, "compile": True}, "compile=True .* names no blocks"),
    "offload that keeps every block": (
        llama,
        "dp_shard=2",
        {"memory": MemoryPolicy(offload=ActivationOffload(keep_last=2))},
        r"ActivationOffload\(keep_last=2\) keeps all of the 2 blocks",
    ),
    "a parameter that is a transposed view": (
        lambda: Own(torch.zeros(4, 6).t()),
        "dp_shard=2",
        NO_BLOCKS,
        r"parameter 'given' of shape \[6, 4\] has the strides \[1, 6\]",
    ),
    "a complex parameter": (
        lambda: Own(torch.zeros(4, dtype=torch.complex64)),
        "dp_shard=2",
        NO_BLOCKS,
        "parameter 'given' is complex64",
    ),
    "a complex parameter on tp": (
        lambda: Own(torch.zeros(4, dtype=torch.complex64)),
        "tp=2",
        NO_BLOCKS,
        "parameter 'given' is complex64",
    ),
    "a block in two dtypes": (
        in_two_dtypes,
        "dp_shard=2",
        {},
        "'layers.1.input_layernorm.weight' is float32 and 'layers.1.mlp.gate_proj.weight' bfloat16|in two dtypes",
    ),
}


def refusals(name: str) -> dict[str, str]:
    make, mesh, choices, _ = REFUSED[name]
    texts = {}

    def say(verb: str, call: Callable[[nn.Module, dict[str, Any]], Any]) -> None:
        made = make()
        model, plan = made if isinstance(made, tuple) else (made, LLAMA_PLAN)
        try:
            call(model, {"plan": plan, **choices})
        except mk.MeshkitError as error:
            texts[verb] = str(error)

    said = {"rows": 1, "seq_len": 8}
    say("parallelize", lambda model, chosen: mk.parallelize(model, mesh_for(mesh), **chosen))
    say("explain", lambda model, chosen: mk.explain(model, mesh, **said, device="cpu", **chosen))
    say("page", lambda model, chosen: mk.preflight.page.explain_page(model, mesh, memory_bars=False, **said, **chosen))
    return texts


@pytest.mark.parametrize("name", REFUSED)
def test_what_parallelize_refuses_every_verb_refuses_with_the_same_text(name: str) -> None:
    *_, match = REFUSED[name]
    for texts in pool(2).run(refusals, name):
        assert set(texts) == {"parallelize", "explain", "page"}, texts
        assert len(set(texts.values())) == 1, texts
        assert re.search(match, texts["explain"])


@pytest.mark.parametrize("name", [name for name in REFUSED if "fp8 with" in name or "idle" in name or "zero" in name])
def test_estimate_refuses_it_too(name: str) -> None:
    make, mesh, choices, match = REFUSED[name]
    with pytest.raises(mk.errors.PlanError, match=match):
        mk.estimate(make(), mesh, rows=1, seq_len=8, kernels="cpu", plan=LLAMA_PLAN, **choices)


def test_a_backend_that_loses_gradients_is_refused_where_blocks_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(PlanError, match="compile='eager' of torch 2.11.0 loses gradients .* Use 'aot_eager'"):
        refuse_backend("eager", MeshSpec(tp=2))
    refuse_backend("eager", MeshSpec(dp_shard=2))
    monkeypatch.setattr(torch, "__version__", "2.15.0")
    refuse_backend("eager", MeshSpec(tp=2))
