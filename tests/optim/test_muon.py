"""Muon on every mesh is Muon on one device, which is torch's on matrices; what it sends is what its plans say."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import meshkit as mk
from meshkit.core.model_state import copies_of
from meshkit.core.sharding import local_tensor, placed
from meshkit.moe.aux_loss import collect
from meshkit.optim import WholeMatrices, orthogonalise
from meshkit.preflight.observe import Peak
from tests.compare_shards import computed_once, difference
from tests.laws.parity.cases import Cell, Moe, batches, build, mesh_for, own_rows, plan_of, start
from tests.world import pool

LR, TOL = 1e-2, 1e-9  # fp64; Newton-Schulz makes small singular values up to some thousand times as large
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def is_matrix(name: str, param: Tensor) -> bool:
    return param.ndim > 1 and name.startswith("layers.")


def plain_muon(param: Tensor, gradient: Tensor, momentum: Tensor) -> None:
    """By the definition, of one matrix, in the dtype of the parameter."""
    momentum.mul_(0.95).add_(gradient, alpha=1 - 0.95)
    update = (1 - 0.95) * gradient + 0.95 * momentum
    a, b, c = COEFFICIENTS
    x = update / update.norm()
    for _ in range(5):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    param.mul_(1 - LR * 0.1).sub_(x * LR * 0.2 * max(param.shape) ** 0.5)


@lru_cache(maxsize=2)
def reference(cell: Cell) -> dict[str, Tensor]:
    """The parameters after a plain loop on one device."""
    model = build(cell)
    named = dict(model.named_parameters())
    others = {name: param for name, param in named.items() if not is_matrix(name, param)}
    adam = torch.optim.AdamW(
        [
            {"params": [param for param in others.values() if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in others.values() if param.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
    )
    momenta = {name: torch.zeros_like(param) for name, param in named.items() if name not in others}
    for batch in batches(cell):
        with collect() as found:
            logits = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        (loss + found.total() / (batch["labels"] != -100).sum()).backward()
        with torch.no_grad():
            for name, momentum in momenta.items():
                param = named[name]
                assert param.grad is not None
                every = [(param, param.grad, momentum)]
                if param.ndim == 3:
                    every = list(zip(param, param.grad, momentum, strict=True))
                for one in every:
                    plain_muon(*one)
        adam.step()
        model.zero_grad()
    return {name: param.detach() for name, param in named.items()}


def worst(run: mk.Run, wanted: dict[str, Tensor]) -> float:
    copies = copies_of(run.model)
    return max(difference(param, wanted[copies.get(name, name)]) for name, param in run.named_parameters())


def trained(cell: Cell, folder: str = "") -> float:
    """The farthest of the parameters from one device. folder: the last step is taken by a run that goes on from there."""
    wanted = computed_once(reference, cell)
    run = start(cell)
    optimizer = mk.muon(run, lr=LR, dtype=None)
    for number, batch in enumerate(batches(cell)):
        if folder and number == 2:
            with mk.Checkpointer(folder) as checkpoints:
                checkpoints.load(run, optimizer)
        elif folder:
            continue
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        optimizer.step()
        optimizer.zero_grad()
    return worst(run, wanted)


def saved(cell: Cell, folder: str) -> None:
    run = start(cell)
    optimizer = mk.muon(run, lr=LR, dtype=None)
    for batch in batches(cell)[:2]:
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        optimizer.step()
        optimizer.zero_grad()
    with mk.Checkpointer(folder) as checkpoints:
        checkpoints.save(2, run, optimizer)


MESHES = [
    "tp=1",
    "dp_shard=2",
    "dp_shard=3",  # uneven shards
    "dp_replicate=2",
    "tp=2",
    "cp=2",
    "pp=2",
    "dp_shard=2 tp=2",
    "dp_replicate=2 dp_shard=2",
    "pp=2 dp_shard=2",
]


def ranks_of(mesh: str) -> int:
    return mk.MeshSpec.parse(mesh).world_size


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_is_one_device(mesh: str) -> None:
    cell = Cell(mesh=mesh, layers=4 if "pp" in mesh else 2)
    assert max(pool(ranks_of(mesh)).run(trained, cell)) <= TOL


@pytest.mark.parametrize("mesh", ["tp=1", "dp_shard=2", "dp_shard=2 ep=2", "dp_shard=4 ep=2", "tp=2 etp=2", "tp=2"])
def test_experts_are_matrices_of_their_own(mesh: str) -> None:
    assert max(pool(ranks_of(mesh)).run(trained, Cell(mesh=mesh, layers=3, moe=Moe()))) <= TOL


def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    pool(2).run(saved, Cell(mesh="dp_shard=2"), str(tmp_path))
    assert max(pool(4).run(trained, Cell(mesh="dp_shard=2 tp=2"), str(tmp_path))) <= TOL


def beside_torchs() -> float:
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 24), (24, 8), (16, 16))]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in matrices]
    mesh = mk.init_mesh("tp=1")
    whole = WholeMatrices(mesh, {str(index): param for index, param in enumerate(matrices)}, dtype=torch.bfloat16)
    optimizer = torch.optim.Muon(theirs, lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    gradients = {str(index): torch.randn_like(param) for index, param in enumerate(matrices)}
    for index, param in enumerate(theirs):
        param.grad = gradients[str(index)].clone()
    optimizer.step()
    whole.apply(gradients, orthogonalise)
    farthest = 0.0
    for index, (before, after) in enumerate(zip(matrices, theirs, strict=True)):
        update = (before - after).detach() / (0.2 * max(before.shape) ** 0.5)
        farthest = max(farthest, float((update - gradients[str(index)]).abs().max()))
    return farthest


def test_in_bf16_it_is_torchs() -> None:
    """To a few bf16 roundings of five iterations: theirs are fused products."""
    assert pool(1).run(beside_torchs)[0] < 0.05


def sent(mesh: str) -> tuple[int, int, float]:
    """(bytes of the plans from this rank, its work, and the mean of all)"""
    run = start(Cell(mesh=mesh, layers=4))
    optimizer = mk.muon(run, lr=LR)
    run.forward_backward(own_rows(batches(Cell(mesh=mesh, layers=4))[0], run.mesh))
    rank = run.mesh.ranks[run.mesh.rank]
    said = sum(size for plan in optimizer.whole.plans for (sender, _), size in plan.links.items() if sender == rank)
    seen = 0
    real = torch.distributed.batch_isend_irecv

    def counting(operations: list[Any]) -> list[Any]:
        nonlocal seen
        seen += sum(each.tensor.numel() for each in operations if each.op is torch.distributed.isend)
        return real(operations)

    torch.distributed.batch_isend_irecv = counting
    try:
        optimizer.step()
    finally:
        torch.distributed.batch_isend_irecv = real
    return said, seen, optimizer.whole.plans[0].bytes_moved


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2 tp=2", "dp_replicate=2"])
def test_what_is_sent_is_what_the_plans_say(mesh: str) -> None:
    for said, seen, moved in pool(ranks_of(mesh)).run(sent, mesh):
        assert said == seen
        assert seen or mesh == "dp_replicate=2"
        assert moved == 0 or mesh != "dp_replicate=2"  # replicas have all of it; only results travel


def shared_out() -> list[int]:
    run = start(Cell(mesh="dp_shard=4", layers=4))
    whole = mk.muon(run, lr=LR).whole
    _, owners = whole._layouts
    return [
        sum(torch.Size(each.shape).numel() for each in owners.tensors.values() if rank in each.regions)
        for rank in range(4)
    ]


def test_ranks_have_about_equally_many_matrices() -> None:
    elements = pool(4).run(shared_out)[0]
    assert max(elements) <= 1.2 * sum(elements) / 4


def refusals() -> list[str]:
    said = []
    for memory in (
        mk.MemoryPolicy(optimizer=mk.strategy.OptimizerPolicy(states="8bit")),
        mk.MemoryPolicy(optimizer=mk.strategy.OptimizerPolicy(offload=mk.strategy.OptimizerOffload())),
    ):
        run = start(Cell(mesh="tp=1", memory=memory))
        with pytest.raises(mk.errors.PlanError) as error:
            mk.muon(run, lr=LR)
        said.append(str(error.value))
    run = mk.parallelize(torch.nn.Linear(4, 4), mesh_for("tp=1"))
    with pytest.raises(mk.errors.PlanError) as error:
        mk.muon(run, lr=LR)
    return [*said, str(error.value)]


def test_refusals() -> None:
    bits, host, blocks = pool(1).run(refusals)[0]
    assert "in few bits" in bits and bits == host
    assert blocks.startswith("muon: the run has no matrices in blocks.")


def measured() -> tuple[int, int]:
    """(the most bytes of a step beside the model's, as measured; peak of the estimate) of this rank"""
    cell = Cell(mesh="dp_shard=2", layers=4, hidden_mlp=320)
    run = start(cell)
    optimizer = mk.muon(run, lr=LR)
    batch = own_rows(batches(cell)[0], run.mesh)
    rows, tokens = batch["input_ids"].shape
    for _ in range(2):  # the first makes the state
        with Peak() as peak:
            run.forward_backward(batch)
            optimizer.step()
            optimizer.zero_grad()
    held = sum(local_tensor(param).nbytes for param in run.parameters())
    held += sum(local_tensor(each).nbytes for state in optimizer.state.values() for each in state.values())
    return peak.bytes + held, rows * tokens


def estimated(rows: int) -> int:
    cell = Cell(mesh="dp_shard=2", layers=4, hidden_mlp=320)
    found = mk.estimate(
        build(cell),
        "dp_shard=2",
        mk.Strategy(plan=plan_of(cell)),
        rows=rows,
        seq_len=cell.tokens,
        kernels="cpu",
        optimizer=lambda run: mk.muon(run, lr=LR),
    )
    return found.peak_bytes


def test_an_estimate_knows_what_a_step_holds() -> None:
    peak, tokens = pool(2).run(measured)[0]
    said = estimated(tokens // Cell(mesh="tp=1").tokens)
    assert said == pytest.approx(peak, rel=0.1)


# ------------------------------------------------------------------------------------------------------ groups


def one_step(mesh: str, change: Callable[[mk.Run, mk.optim.Muon], object] | None = None) -> dict[str, Tensor]:
    """How far each shard of a parameter goes in a step, after a change of the groups."""
    run = start(Cell(mesh=mesh, layers=4 if "pp" in mesh else 2))
    optimizer = mk.muon(run, lr=LR, dtype=None, weight_decay=0.0)
    if change is not None:
        change(run, optimizer)
    before = {name: local_tensor(param).clone() for name, param in run.named_parameters()}
    run.forward_backward(own_rows(batches(Cell(mesh=mesh))[0], run.mesh))
    optimizer.step()
    return {name: local_tensor(param).detach() - before[name] for name, param in run.named_parameters()}


def with_a_group_of_its_own(run: mk.Run, optimizer: mk.optim.Muon) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.add_param_group({"params": [params.pop()], "momentum": 0.95, "lr": LR / 10, "weight_decay": 0.0})


def without_the_last(run: mk.Run, optimizer: mk.optim.Muon) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:-1]


def with_the_head(run: mk.Run, optimizer: mk.optim.Muon) -> None:
    """Every rank adds a group, also those whose stage has no head."""
    heads = [param for name, param in run.named_parameters() if name == "lm_head.weight"]
    others = optimizer.param_groups[1]["params"]
    optimizer.param_groups[1]["params"] = [param for param in others if all(param is not head for head in heads)]
    optimizer.add_param_group({"params": heads, "momentum": 0.95, "weight_decay": 0.0})


def moved(mesh: str) -> list[float]:
    """(lr/10 over lr of the last matrix, the farthest off of all others, of the last when left out, of the head by Muon)"""
    plain, apart, out = one_step(mesh), one_step(mesh, with_a_group_of_its_own), one_step(mesh, without_the_last)
    last = [name for name in plain if is_matrix(name, torch.empty(plain[name].shape))][-1]
    others = max(float((apart[name] - plain[name]).abs().max()) for name in plain if name != last)
    tenth = float((apart[last] - plain[last] / 10).abs().max())
    head = one_step(mesh, with_the_head).get("lm_head.weight")
    size = 0.0 if head is None else float(head.square().sum())
    return [tenth, others, float(out[last].abs().max()), size]


@pytest.mark.parametrize("mesh", ["tp=1", "dp_shard=2", "pp=2"])
def test_groups_are_what_is_stepped(mesh: str) -> None:
    told = pool(ranks_of(mesh)).run(moved, mesh)
    for tenth, others, out, _ in told:
        assert tenth <= TOL and others <= TOL and out == 0
    cell = Cell(mesh="tp=1")
    head = dict(build(cell).named_parameters())["lm_head.weight"]
    squares = sum(size for *_, size in told)  # of singular values of about 1, times 0.2 · sqrt(rows)
    about = min(head.shape) * (LR * 0.2 * max(head.shape) ** 0.5) ** 2
    assert 0.5 * about < squares < 1.5 * about


def odd_groups() -> list[str]:
    said = []
    run = start(Cell(mesh="tp=1"))
    vector = next(param for param in run.parameters() if param.ndim == 1)
    for param in (torch.nn.Parameter(torch.ones(3, 3)), vector):
        optimizer = mk.muon(run, lr=LR)
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each is not vector]
        with pytest.raises(mk.errors.PlanError) as error:
            optimizer.add_param_group({"params": [param], "momentum": 0.9})
        assert len(optimizer.param_groups) == 3
        said.append(str(error.value))
    optimizer = mk.muon(run, lr=LR)
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    with pytest.raises(mk.errors.PlanError) as error:
        optimizer.step()
    return [*said, str(error.value)]


def test_odd_groups_are_refused() -> None:
    foreign, vector, appended = pool(1).run(odd_groups)[0]
    assert "a parameter of shape [3, 3] is not the run's" in foreign and "is no matrix." in vector
    assert appended.endswith("was put into a group's list. Give it to add_param_group.")


# ------------------------------------------------------------------------------------------------------ state


def third_steps(mesh: str) -> list[bool]:
    """Whether a third step after state_dict, deepcopy and pickle is that of the optimizer itself, bit for bit."""
    cell = Cell(mesh=mesh)
    run = start(cell)
    optimizer = mk.muon(run, lr=LR, dtype=None)
    batch = own_rows(batches(cell)[0], run.mesh)
    for _ in range(2):
        run.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    other = start(cell)
    loaded = mk.muon(other, lr=1.0, dtype=None)
    loaded.load_state_dict(deepcopy(optimizer.state_dict()))  # torch's shares what need not be cast
    with torch.no_grad():
        for ours, theirs in zip(other.parameters(), run.parameters(), strict=True):
            local_tensor(ours).copy_(local_tensor(theirs))
    other.forward_backward(batch)
    loaded.step()
    twin = deepcopy(optimizer)
    copies = [param for group in twin.param_groups for param in group["params"]]
    run.forward_backward(batch)
    ours = [param for group in optimizer.param_groups for param in group["params"]]
    for copy, param in zip(copies, ours, strict=True):
        copy.grad = None if param.grad is None else param.grad.clone()
    optimizer.step()
    twin.step()
    same = [
        all(torch.equal(local_tensor(a), local_tensor(b)) for a, b in zip(others, params, strict=True))
        for others, params in ((list(other.parameters()), list(run.parameters())), (copies, ours))
    ]
    if run.mesh.spec.world_size == 1:
        unpickled = pickle.loads(pickle.dumps(optimizer))
        states = [each.state_dict()["state"] for each in (optimizer, unpickled)]
        same.append(all(torch.equal(states[1][key][name], value) for key in states[0]
                        for name, value in states[0][key].items()))  # fmt: skip
        with pytest.raises(mk.errors.PlanError, match="this one was unpickled, and is of no run"):
            unpickled.step()
    return same


@pytest.mark.parametrize("mesh", ["tp=1", "dp_shard=2"])
def test_its_state_is_loaded_and_copied_as_that_of_torchs(mesh: str) -> None:
    for same in pool(ranks_of(mesh)).run(third_steps, mesh):
        assert all(same)


MAKERS: dict[str, Callable[[mk.Run], torch.optim.Optimizer]] = {
    "AdamW": lambda run: mk.adamw(run, lr=LR),
    "Muon": lambda run: mk.muon(run, lr=LR),
    "SGD": lambda run: torch.optim.SGD(run.parameters(), lr=LR, momentum=0.9),
}


def loaded_by_another(saved: str, wanted: str, folder: str) -> str:
    run = start(Cell(mesh="dp_shard=2"))
    optimizer = MAKERS[saved](run)
    run.forward_backward(own_rows(batches(Cell(mesh="dp_shard=2"))[0], run.mesh))
    optimizer.step()
    with mk.Checkpointer(folder) as checkpoints:
        checkpoints.save(1, run, optimizer)
    again = start(Cell(mesh="dp_shard=2"))
    with mk.Checkpointer(folder) as checkpoints:
        try:
            checkpoints.load(again, MAKERS[wanted](again))
        except mk.errors.CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "pair", [("AdamW", "Muon"), ("Muon", "AdamW"), ("SGD", "Muon"), ("Muon", "SGD"), ("AdamW", "SGD")]
)
def test_the_state_of_another_optimizer_is_refused_at_the_load(pair: tuple[str, str], tmp_path: Path) -> None:
    for said in pool(2).run(loaded_by_another, *pair, str(tmp_path)):
        if pair == ("Muon", "SGD"):  # the first parameter is the embedding, which Muon's AdamW steps
            pair = ("AdamW", "SGD")
        assert f"was saved as {pair[0]!r}, and this run's optimizer holds it as {pair[1]!r}. Use the optimizer" in said
        assert "\n" not in said


# ------------------------------------------------------------------------------------------------------ what is a matrix

QUIET = {"use_cache": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "vocab_size": 61}
SMALL = {**QUIET, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


class Chosen(torch.nn.Module):
    """Its program cannot be read: which layers run depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(61, 8), torch.nn.Linear(8, 61)
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(2))

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
            self.mix = torch.nn.Conv1d(8, 8, 3, padding=2, groups=8)
            self.table = torch.nn.Parameter(torch.zeros(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            if float(x.detach().sum()) == 1e9:
                return x
            x = x + self.mix(x.mT)[..., : x.shape[1]].mT + self.table[0]
            return x + self.down(self.up(x).relu())

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def foreign(name: str) -> torch.nn.Module:
    made: dict[str, Callable[[], torch.nn.Module]] = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, **QUIET)),
        "gpt-oss": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(intermediate_size=20, head_dim=8, num_local_experts=6, **HEADS, **SMALL)
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(intermediate_size=20, num_local_experts=6, **HEADS, **SMALL)
        ),
        "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(state_size=4, time_step_rank=4, **SMALL)),
        "lfm2": lambda: transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(layer_types=["conv", "full_attention"], intermediate_size=44, **HEADS, **SMALL)
        ),
        "bloom": lambda: transformers.BloomForCausalLM(
            transformers.BloomConfig(n_head=4, n_layer=2, hidden_size=32, **QUIET)
        ),
        "chosen": Chosen,
    }  # fmt: skip
    return made[name]()


# The last two parts of names in the second layer (LFM2: in both) that are no vectors, by what has them.
MATRICES = {
    "gpt2": "c_attn.weight c_proj.weight c_fc.weight",
    "gpt-oss": "q_proj.weight k_proj.weight v_proj.weight o_proj.weight router.weight experts.gate_up_proj experts.down_proj",
    "mixtral": "q_proj.weight k_proj.weight v_proj.weight o_proj.weight gate.weight experts.gate_up_proj experts.down_proj",
    "mamba": "in_proj.weight x_proj.weight dt_proj.weight out_proj.weight",
    "lfm2": "in_proj.weight out_proj.weight q_proj.weight k_proj.weight v_proj.weight w1.weight w2.weight w3.weight",
    "bloom": "query_key_value.weight dense.weight dense_h_to_4h.weight dense_4h_to_h.weight",
    "chosen": "up.weight down.weight",
}
OTHERS = {
    "gpt-oss": "experts.gate_up_proj_bias experts.down_proj_bias",
    "mamba": "mixer.A_log conv1d.weight",
    "lfm2": "conv.weight",
    "chosen": "mix.weight 1.table 0.table",
}


def shared_by(name: str) -> tuple[set[str], set[str]]:
    """(matrices, other parameters of more than one dim) of blocks"""
    model = foreign(name)
    if name in ("gpt-oss", "mixtral"):
        model.set_experts_implementation("eager")
    plan = mk.plan.Plan(blocks=("layers.*",)) if name == "chosen" else None
    run = mk.parallelize(model, mesh_for("tp=1"), plan=plan)
    optimizer = mk.muon(run, lr=LR)
    of = [{id(param) for param in group["params"]} for group in optimizer.param_groups]
    short: tuple[set[str], set[str]] = set(), set()
    for full, param in run.named_parameters():
        if full.startswith(tuple(f"{block}." for block in run.resolved.blocks)):
            for number in (0, 1):
                if id(param) in of[number]:
                    short[number].add(".".join(full.split(".")[-2:]))
        else:
            assert id(param) not in of[0], full
    return short


@pytest.mark.parametrize("name", MATRICES)
def test_weights_of_products_are_matrices_and_nothing_else(name: str) -> None:
    ((matrices, others),) = pool(1).run(shared_by, name)
    assert matrices == set(MATRICES[name].split())
    assert others == set(OTHERS.get(name, "").split())


# ------------------------------------------------------------------------------------------------------ refused


ODD: list[dict[str, Any]] = [
    {"momentum": 1.5},
    {"momentum": -1.0},
    {"momentum": 1},
    {"steps": 0},
    {"steps": -3},
    {"steps": 2.5},
    {"weight_decay": -1.0},
    {"lr": "x"},
    {"lr": -1.0},
    {"lr": float("nan")},
]


def odd_options() -> list[str]:
    run, said = start(Cell(mesh="tp=1")), []
    for odd in ODD:
        with pytest.raises(mk.errors.PlanError) as error:
            mk.muon(run, **({"lr": LR} | odd))
        said.append(str(error.value))
    return said


def test_odd_options_are_refused_in_a_line() -> None:
    for odd, said in zip(ODD, pool(1).run(odd_options)[0], strict=True):
        ((name, value),) = odd.items()
        assert said.startswith(f"muon({name}={value!r}): give a ") and "\n" not in said


def applied(what: str) -> str:
    run = start(Cell(mesh="dp_shard=2"))
    run.forward_backward(own_rows(batches(Cell(mesh="dp_shard=2"))[0], run.mesh))
    named = {name: param for name, param in run.named_parameters() if param.ndim == (1 if what == "vector" else 2)}
    values = {name: placed(param, torch.ones_like(local_tensor(param))) for name, param in named.items()}
    only = run.mesh.rank == 1
    if what == "missing" or (what == "missing on one" and only):
        values.pop(next(iter(values)))
    if what == "extra":
        values["else"] = torch.ones(2, 2)

    def function(matrix: Tensor) -> Any:
        if what == "raises on one" and only:
            raise RuntimeError("did not converge")
        return {"row": matrix[:1], "scalar": matrix.norm(), "nothing": None}.get(what, matrix)

    try:
        WholeMatrices(run.mesh, named).apply(values, function)
    except mk.errors.MeshkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("vector", "PlanError: WholeMatrices: .* has the shape \\[.*\\]. Give matrices"),
        ("missing", "PlanError: WholeMatrices.apply: the value of .* is missing. Give one of each"),
        ("extra", "PlanError: WholeMatrices.apply: the value of 'else' is none that was named"),
        ("missing on one", "AgreementError: ranks differ in error of .*: none on rank 0, PlanError: .* on rank 1."),
        ("raises on one", "AgreementError: ranks differ in .*: none on rank 0, RuntimeError: did not converge on rank 1"),
        ("row", "has the shape \\[1, .*\\]"),
        ("scalar", "has the shape \\[\\]"),
        ("nothing", "has the type NoneType"),
        ("", "^$"),
    ],
)  # fmt: skip
def test_whole_matrices_refuse_on_all_ranks(what: str, match: str) -> None:
    for said in pool(2).run(applied, what):
        assert re.search(match, said) and "\n" not in said, said
