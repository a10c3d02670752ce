"""Adapters: training on a mesh equals one device written out by hand, merging changes no logits, the rest stays as it was."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import meshkit as mk
from meshkit.core.model_state import copies_of
from meshkit.core.quantized_weight import codes_of
from meshkit.core.sharding import full_tensor
from meshkit.errors import CheckpointError, PlanError
from tests.compare_shards import computed_once, difference, same_bits
from tests.depth import thin
from tests.laws.parity.cases import MAX_NORM, Cell, Moe, batches, build, memory_of, mesh_for, own_rows, plan_of
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of summation differs
RANK, ALPHA = 3, 5.0


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """A cell of the parity suite, with adapters."""

    cell: Cell
    targets: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()
    rslora: bool = False
    base: Any = None
    block: int = 4
    extra: dict[str, Any] = field(default_factory=dict)

    def attach(self, model: nn.Module, plan: mk.Plan) -> mk.Plan:
        plan = mk.lora.attach(
            model,
            plan,
            rank=RANK,
            alpha=ALPHA,
            targets=self.targets,
            rslora=self.rslora,
            modules_to_save=self.modules_to_save,
            base=self.base,
            base_block=self.block,
            seed=4,
        )
        with torch.no_grad():  # away from 0, or A's gradients would be 0
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.copy_(torch.linspace(-0.3, 0.4, param.numel()).view(param.shape).sin())
        return plan

    @property
    def scaling(self) -> float:
        return ALPHA / (RANK**0.5 if self.rslora else RANK)


def decoded(model: nn.Module) -> dict[str, Tensor]:
    """What the codes of a model's frozen layers stand for."""
    found = {name: (child, codes_of(child)) for name, child in model.named_modules() if codes_of(child) is not None}
    return {
        name: codes.decode(child.weight.detach(), child.in_features, torch.float64)
        for name, (child, codes) in found.items()
    }


def reference(case: Adapted) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, norms, first gradients and final values: the plain model on the weights W + s B A, by autograd."""
    model, marked = build(case.cell), build(case.cell)
    case.attach(marked, plan_of(case.cell))
    trained = {name: p.detach().clone().requires_grad_() for name, p in marked.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in model.named_parameters() if name not in trained}
    frozen |= {f"{name}.weight": weight for name, weight in decoded(marked).items()}
    decayed, plain = ([p for p in trained.values() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, betas=(0.9, 0.95))
    losses, norms, gradients = [], [], {}
    for batch in batches(case.cell):
        weights = {**frozen, **{name: p for name, p in trained.items() if "lora_" not in name}}
        for name, up in trained.items():
            if name.endswith("lora_B.weight"):
                target = name.removesuffix("lora_B.weight")
                product = up @ trained[f"{target}lora_A.weight"]
                weights[f"{target}weight"] = frozen[f"{target}weight"] + case.scaling * product
        logits = functional_call(model, weights, (batch["input_ids"],))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in trained.items()}
        norms.append(nn.utils.clip_grad_norm_(trained.values(), MAX_NORM).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, gradients, {name: p.detach() for name, p in trained.items()}


def train(case: Adapted) -> dict[str, float]:
    """On every rank: three steps on the mesh; largest differences from one device, and of the merged model's logits."""
    cell = case.cell
    model = build(cell)
    plain = {name for name, _ in model.named_parameters()}
    plan = case.attach(model, plan_of(cell))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name in plain}
    mesh = mesh_for(cell.mesh)
    run = mk.parallelize(
        model,
        mesh,
        plan=plan,
        memory=memory_of(cell),
        zero=None if mesh.spec.pp > 1 else cell.zero,
        sequence=cell.sequence,
        pipeline=mk.strategy.PipelinePolicy(schedule=cell.schedule),
        context=cell.context,
        compile=cell.compile or False,
        **case.extra,
    )
    losses, norms, gradients, parameters = computed_once(reference, case)
    optimizer = mk.adamw(run, lr=1e-2)
    copies = copies_of(run.model)
    worst = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "parameter": 0.0, "frozen": 0.0}
    for step, batch in enumerate(batches(cell)):
        loss = run.forward_backward(own_rows(batch, mesh), microbatches=cell.microbatches)
        if step == 0:
            for name, param in run.named_parameters():
                name = copies.get(name, name)
                assert (param.grad is not None) == (name in gradients), name
                if param.grad is not None:
                    worst["gradient"] = max(worst["gradient"], difference(param.grad, gradients[name]))
        norm = mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        worst["loss"] = max(worst["loss"], abs(float(loss) - losses[step]))
        worst["norm"] = max(worst["norm"], abs(float(norm) - norms[step]))
    for name, param in run.named_parameters():
        name = copies.get(name, name)
        if name in parameters:
            worst["parameter"] = max(worst["parameter"], difference(param, parameters[name]))
        else:
            assert same_bits(param, before[name]), f"{name} is frozen, and has changed"
    held_out = own_rows(batches(cell)[0], mesh)
    adapted, _ = run.evaluate(held_out)
    with mk.lora.disabled(run.model):
        off, _ = run.evaluate(held_out)
    assert abs(float(off - adapted)) > 1e-3
    if case.base is not None and mesh.spec.world_size > 1:
        with pytest.raises(PlanError, match="the base is in few bits, and its shards cannot"):
            mk.lora.merge(run.model)
        return worst
    mk.lora.merge(run.model)
    assert {copies.get(name, name) for name, _ in run.named_parameters()} <= set(before)
    merged, _ = run.evaluate(held_out)
    worst["merged"] = abs(float(merged - adapted))
    return worst


ATTENTION = ("layers.*.self_attn.{q,k,v,o}_proj",)
CASES = {
    "one": (1, Adapted(cell=Cell(mesh="", microbatches=2), rslora=True)),
    "dp_shard": (4, Adapted(cell=Cell(mesh="dp_shard=4", microbatches=2, qwen=True))),
    "zero1": (2, Adapted(cell=Cell(mesh="dp_shard=2", zero=1, microbatches=2, tied=True))),
    "tp": (2, Adapted(cell=Cell(mesh="tp=2", qwen=True, hidden_mlp=45, tied=True))),
    "tp_sequence": (2, Adapted(cell=Cell(mesh="tp=2", sequence=True, qwen=True, recompute="full"))),
    "tp_regather": (
        2,
        Adapted(cell=Cell(mesh="tp=2", sequence=True, memory=mk.MemoryPolicy(regather=True))),
    ),
    "tp_uneven_heads": (4, Adapted(cell=Cell(mesh="tp=4", heads=(9, 3), qwen=True), targets=ATTENTION)),
    "tp_uneven_kv": (4, Adapted(cell=Cell(mesh="tp=4", sequence=True, heads=(8, 2)), targets=ATTENTION)),
    "dp_tp": (
        4,
        Adapted(
            cell=Cell(mesh="dp_shard=2 tp=2", sequence=True, recompute="selective"),
            targets=("layers.0.self_attn.q_proj", "layers.*.mlp.{up,down}_proj"),
            modules_to_save=("lm_head", "norm"),
        ),
    ),
    "cp": (2, Adapted(cell=Cell(mesh="cp=2"))),
    "pp": (2, Adapted(cell=Cell(mesh="pp=2", microbatches=2, tied=True))),
    "pp_apart": (2, Adapted(cell=Cell(mesh="pp=2", microbatches=2, schedule="zbv", layers=4, qwen=True))),
    "pp_frozen_stage": (  # the first stage of four trains nothing
        2,
        Adapted(
            cell=Cell(mesh="pp=2", microbatches=2, layers=4, schedule="interleaved"),
            targets=("layers.{1,2,3}.self_attn.q_proj",),
        ),
    ),
    "pp_tp": (4, Adapted(cell=Cell(mesh="pp=2 tp=2", microbatches=3, sequence=True))),
    "compiled": (2, Adapted(cell=Cell(mesh="tp=2", layers=1, sequence=True, compile="aot_eager", qwen=True))),
    "chunked_loss": (
        2,
        Adapted(cell=Cell(mesh="tp=2", memory=mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=7), mlp_chunks=2))),
    ),
    "experts": (2, Adapted(cell=Cell(mesh="dp_shard=2 ep=2", moe=Moe(shared=16)))),
    "nf4": (1, Adapted(cell=Cell(mesh="", microbatches=2, qwen=True), base="nf4", block=64)),
    "nf4_dp_shard": (4, Adapted(cell=Cell(mesh="dp_shard=4", microbatches=2, hidden_mlp=45), base="nf4", block=8)),
    "nf4_tp": (4, Adapted(cell=Cell(mesh="dp_shard=2 tp=2", sequence=True, recompute="selective"), base="nf4")),
    "int8_tp_uneven_heads": (
        4,
        Adapted(cell=Cell(mesh="tp=4", heads=(9, 3), qwen=True), targets=ATTENTION, base="int8"),
    ),
    "nf4_regather": (
        2,
        Adapted(cell=Cell(mesh="tp=2", sequence=True, memory=mk.MemoryPolicy(regather=True)), base="nf4"),
    ),
    "int8_pp": (2, Adapted(cell=Cell(mesh="pp=2", microbatches=2, schedule="zbv", layers=4), base="int8")),
    "nf4_saved": (
        2,
        Adapted(
            cell=Cell(mesh="dp_shard=2", recompute="full"),
            targets=("layers.*.self_attn.q_proj",),
            modules_to_save=("lm_head", "layers.1.mlp"),
            base="nf4",
        ),
    ),
    "int8_experts": (2, Adapted(cell=Cell(mesh="dp_shard=2 ep=2", moe=Moe(shared=16)), base="int8")),
    "nf4_compiled": (2, Adapted(cell=Cell(mesh="tp=2", sequence=True, compile="aot_eager"), base="nf4")),
}


def train_quietly(case: Adapted) -> dict[str, float]:
    with warnings.catch_warnings():
        if case.cell.compile:
            warnings.simplefilter("ignore")  # tracing probes attributes, .grad of non-leaves for one, that warn
        return train(case)


@pytest.mark.parametrize("name", thin(list(CASES), 2))
def test_training_equals_one_device_and_merging_keeps_the_loss(name: str) -> None:
    ranks, case = CASES[name]
    for worst in pool(ranks).run(train_quietly, case):
        assert max(worst.values()) <= TOL_FP64, (name, worst)


def test_after_lora_disabled_every_adapter_counts_again() -> None:
    """The oracle: the frozen model with scaling * B A added to its weights by hand."""
    cell = Cell(mesh="")
    model, by_hand, frozen = build(cell), build(cell), build(cell)
    case = Adapted(cell=cell)
    case.attach(model, plan_of(cell))
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in by_hand.named_parameters():
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in tensors:
                weight += case.scaling * tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]
    ids = batches(cell)[0]["input_ids"]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(ids), by_hand(ids), rtol=0, atol=TOL_FP64)
            with mk.lora.disabled(model):
                torch.testing.assert_close(model(ids), frozen(ids), rtol=0, atol=TOL_FP64)


def test_merging_in_bf16_rounds_once() -> None:
    """Numbers whose product and sum are exact in fp32, and not in bf16: so their sum, rounded, is the only right one."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-255, 256, (24, 20), generator=generator) / 64
    down, up = (torch.randint(-127, 128, shape, generator=generator) / 64 for shape in ((4, 20), (24, 4)))
    model = nn.Sequential(nn.Linear(20, 24, bias=False)).bfloat16()
    mk.lora.attach(model, mk.plan.auto_plan(model), rank=4, alpha=2.0, targets=("0",), dtype=torch.bfloat16)
    layer: Any = model[0]
    with torch.no_grad():
        for param, value in ((layer.weight, weight), (layer.lora_A.weight, down), (layer.lora_B.weight, up)):
            param.copy_(value)
            assert torch.equal(param.float(), value), "bf16 has these numbers"
    mk.lora.merge(model)
    exact = weight.double() + 0.5 * up.double() @ down.double()
    assert torch.equal(exact.float().double(), exact)
    assert torch.equal(layer.weight, exact.bfloat16())


def refuse(model: nn.Module, match: str, **options: Any) -> None:
    with pytest.raises(PlanError, match=match):
        mk.lora.attach(model, mk.models.LLAMA_PLAN, **options)


def test_what_takes_no_adapters_is_refused() -> None:
    cell = Cell(mesh="", tied=True)
    refuse(build(cell), r"pattern '\*\*.query' matches no module", targets=("**.query",))
    refuse(build(cell), "'lm_head' is vocab\\(\\) in the plan", targets=("lm_head",))
    refuse(build(cell), "'norm' is a RMSNorm, and adapters are for nn.Linear", targets=("norm",))
    refuse(build(cell), "is one string; give a tuple", targets="lm_head")
    refuse(build(cell), "shares a tied parameter with 'embed_tokens.weight'", modules_to_save=("lm_head",))
    refuse(build(cell), "is a target and in modules_to_save", modules_to_save=("layers.0",))
    refuse(build(cell), "rank=0 alpha=32.0: rank is a whole number", rank=0)
    adapted = build(cell)
    plan = mk.lora.attach(adapted, mk.models.LLAMA_PLAN, rank=2)
    refuse(adapted, "has adapters already")
    with pytest.raises(PlanError, match="the model has no adapters"):
        mk.lora.merge(build(cell))
    with pytest.raises(PlanError, match="no place for. Call mk.lora.merge first"):
        mk.models.save_pretrained(adapted, {}, "unused")
    assert plan.tensor["layers.*.mlp.down_proj.lora_A"].kind == "row"
    sparse = Cell(mesh="", moe=Moe())
    with pytest.raises(PlanError, match="are stacked experts, which take no adapters yet"):
        mk.lora.attach(build(sparse), plan_of(sparse), targets=("layers.1.mlp.experts",))


def plans_that_cannot_run() -> int:
    model = build(Cell(mesh=""))
    plan = mk.lora.attach(model, mk.models.LLAMA_PLAN, rank=2, targets=("layers.1.mlp.up_proj",))
    with pytest.raises(PlanError, match="no parameter of the stages of pp rank 0 requires a gradient"):
        mk.parallelize(model, mesh_for("pp=2"), plan=plan)
    with pytest.raises(PlanError, match="adapted layers would not multiply in fp8"):
        memory = mk.MemoryPolicy(precision=mk.strategy.Precision(fp8=mk.strategy.Fp8(emulate=True)))
        mk.parallelize(model, mesh_for("dp_shard=2"), plan=plan, memory=memory)
    return 2


def test_runs_that_would_not_work_are_refused() -> None:
    assert pool(2).run(plans_that_cannot_run) == [
        2,
        2,
    ]  # refused on each rank, or `pytest.raises` would have raised there


# ------------------------------------------------------------------------------------------------------------ PEFT

PEFT_CELL = Cell(mesh="", dtype="float32")
of_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT calls it
IDS = torch.arange(24).view(2, 12) * 5 % 64


def transformers_model(folder: str) -> Any:
    """Our base model in transformers: its values are read from a folder of ours."""
    transformers = pytest.importorskip("transformers")
    model = build(PEFT_CELL)
    mk.models.save_pretrained(model, model.config, folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def save_from_mesh(folder: str, mesh: str, options: dict[str, Any]) -> Tensor:
    """Adapters on a mesh, from meta and a folder, written by all ranks; the logits of one device with the same."""
    case = Adapted(cell=PEFT_CELL, **options)
    model = build(PEFT_CELL)
    plan = case.attach(model, plan_of(PEFT_CELL))
    expected = model(IDS).detach()
    run = mk.parallelize(model, mesh_for(mesh), plan=plan)
    mk.models.save_lora(run.model, folder, base="base")
    return expected


def load_into_mesh(base: str, folder: str, mesh: str) -> tuple[dict[str, Tensor], int]:
    """On meta, base and adapters read from their folders; whole tensors of this rank."""
    with mk.models.meta_parameters():
        model = mk.models.build_model(mk.models.config_from_pretrained(base))
    plan = mk.lora.attach(model, plan_of(PEFT_CELL), **mk.models.lora_options(folder))
    run = mk.parallelize(model, mesh_for(mesh), plan=plan)
    mk.models.load_pretrained(run.model, base)
    mk.lora.init(run.model, seed=1)
    mk.models.load_lora(run.model, folder)
    return {name: full_tensor(param) for name, param in run.named_parameters()}, len(list(run.parameters()))


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dp_shard=2 tp=2", {}),
    ("pp=2 tp=2", {"targets": ("layers.*.self_attn.{q,v}_proj",), "rslora": True, "modules_to_save": ("lm_head",)}),
    ("tp=4", {"targets": ("layers.1.self_attn.o_proj", "layers.0.mlp.up_proj")}),
]


@of_peft
@pytest.mark.parametrize(("mesh", "options"), OPTIONS, ids=["all", "saved_head", "few_layers"])
def test_peft_reads_a_folder_of_any_mesh_and_gives_the_same_logits(
    tmp_path: Any, mesh: str, options: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    theirs = transformers_model(str(tmp_path / "base"))
    expected = pool(4).run(save_from_mesh, str(tmp_path / "lora"), mesh, options)[0]
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "lora").eval()
    with torch.no_grad():
        assert float((wrapped(IDS).logits - expected).abs().max()) <= 1e-5
        merged = wrapped.merge_and_unload()(IDS).logits
        assert float((merged - expected).abs().max()) <= 1e-5


@of_peft
def test_a_folder_of_peft_is_read_onto_any_mesh(tmp_path: Any) -> None:
    peft = pytest.importorskip("peft")
    theirs = transformers_model(str(tmp_path / "base"))
    config = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    wrapped = peft.get_peft_model(theirs, config).eval()
    wrapped.save_pretrained(tmp_path / "lora")
    with torch.no_grad():
        expected = wrapped(IDS).logits
    options = mk.models.lora_options(tmp_path / "lora")
    model = build(PEFT_CELL)
    mk.lora.attach(model, plan_of(PEFT_CELL), **options)
    mk.models.load_lora(model, tmp_path / "lora")
    assert float((model(IDS).detach() - expected).abs().max()) <= 1e-5
    whole = dict(model.named_parameters())
    held: set[str] = set()
    for mesh in ("dp_shard=2 tp=2", "pp=2 tp=2"):
        for tensors, _ in pool(4).run(load_into_mesh, str(tmp_path / "base"), str(tmp_path / "lora"), mesh):
            held |= tensors.keys()
            assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
    assert held == whole.keys()
    other = build(PEFT_CELL)
    mk.lora.attach(other, plan_of(PEFT_CELL), rank=2)
    with pytest.raises(CheckpointError, match="'r': 4, .*, but the model's {'r': 2"):
        mk.models.load_lora(other, tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_config.json"
    path.write_text(path.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(CheckpointError, match="use_dora=True is not supported"):
        mk.models.load_lora(model, tmp_path / "lora")


# ------------------------------------------------------------------------------------------------------ first values


def start_on_meta(mesh: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = mk.models.Llama(build(PEFT_CELL).config)
    plan = mk.lora.attach(model, plan_of(PEFT_CELL), rank=RANK)
    run = mk.parallelize(model, mesh_for(mesh), plan=plan)
    mk.init_weights(run.model, seed=4, plan=plan)
    return {name: full_tensor(param) for name, param in run.named_parameters()}


def test_adapters_on_meta_start_as_on_one_device_whose_model_they_leave_as_it_is() -> None:
    model = build(PEFT_CELL)
    before = model(IDS)
    state = torch.get_rng_state()
    mk.lora.attach(model, plan_of(PEFT_CELL), rank=RANK, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(IDS), before)
    expected = {name: param for name, param in model.named_parameters() if "lora_" in name}
    bound = 32**-0.5
    widest = float(expected["layers.0.self_attn.q_proj.lora_A.weight"].detach().abs().max())
    assert 0.9 * bound < widest <= bound
    for tensors in pool(4).run(start_on_meta, "dp_shard=2 tp=2"):
        assert all(torch.equal(tensors[name], param) for name, param in expected.items())


def train_in_bf16() -> tuple[float, float]:
    model = build(Cell(mesh="", dtype="bfloat16"))
    plan = mk.lora.attach(model, plan_of(PEFT_CELL), rank=RANK, dtype=torch.float32)
    before = {name: param.detach().clone() for name, param in model.named_parameters() if not param.requires_grad}
    memory = mk.MemoryPolicy(precision=mk.strategy.Precision())
    run = mk.parallelize(model, mesh_for("dp_shard=2"), plan=plan, memory=memory)
    optimizer = mk.adamw(run, lr=1e-2)
    losses = []
    for _ in range(8):
        losses.append(float(run.forward_backward(own_rows(batches(PEFT_CELL)[0], run.mesh))))
        optimizer.step()
        optimizer.zero_grad()
    for name, param in run.named_parameters():
        assert param.dtype == (torch.float32 if param.requires_grad else torch.bfloat16)
        assert name not in before or same_bits(param, before[name])
    return losses[0], losses[-1]


def test_fp32_adapters_on_a_bf16_model_learn() -> None:
    for first, last in pool(2).run(train_in_bf16):
        assert last < first - 0.2


def observe_step(case: Adapted) -> tuple[Any, Any]:
    cell = case.cell
    model = build(cell)
    plan = case.attach(model, plan_of(cell))
    run = mk.parallelize(model, mesh_for(cell.mesh), plan=plan, memory=memory_of(cell))
    local = own_rows(batches(cell)[0], run.mesh)
    with mk.observe(run.mesh) as seen:
        run.forward_backward(local, microbatches=cell.microbatches)
        mk.clip_grad_norm(run, 1.0)
    place = {axis: run.mesh[axis].get_local_rank() for axis in ("pp", "dp_shard", "cp", "tp")}
    rows, tokens = local["labels"].shape
    shape = {"rows": rows, "seq_len": tokens, "microbatches": cell.microbatches}
    return seen, mk.explain(run, **shape, coordinate=place).messages


OBSERVED = {
    "dp_shard": Adapted(cell=Cell(mesh="dp_shard=2")),
    "pp": Adapted(cell=Cell(mesh="pp=2", microbatches=2)),
    "few_bits": Adapted(cell=Cell(mesh="dp_shard=2", dtype="float32", bf16=True), base="nf4", block=16),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_explain_knows_that_only_adapters_have_gradients_and_codes_travel_as_bytes(name: str) -> None:
    for seen, said in pool(2).run(observe_step, OBSERVED[name]):
        assert seen == said
