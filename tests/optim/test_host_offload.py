"""An optimizer on the host gives the parameters of the resident one, bit for bit, on every mesh."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshkit as mk
from meshkit.core._torch import TorchDispatchMode
from meshkit.core.sharding import full_tensor, local_tensor
from meshkit.mesh.world import cores_of_rank
from meshkit.optim import OffloadedAdamW, choose_resident, host_offload, place_tensors, resident_share
from meshkit.step import grad_norm
from meshkit.strategy import OptimizerOffload, OptimizerPolicy
from tests.depth import thin
from tests.laws.parity.cases import MAX_NORM, Cell, Moe, batches, own_rows, start
from tests.world import pool


def trained(cell: Cell, offload: OptimizerOffload | None) -> tuple[list[float], list[Tensor], bool]:
    """(norms, parameters and moments of this rank, whether gradients left their parameters) after three steps, with
    accumulation, clipping and a schedule; of the steps one is skipped.
    """
    run = start(replace(cell, memory=mk.MemoryPolicy(optimizer=OptimizerPolicy(offload=offload))))
    optimizer = mk.adamw(run, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    norms, left = [], True
    for index, batch in enumerate([*batches(cell), *batches(cell)[:1]]):
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        if run.pipeline is None:
            left = left and all(param.grad is None for param in run.parameters())
        norms.append(float(mk.clip_grad_norm(run, MAX_NORM)))
        assert float(grad_norm(run)) <= MAX_NORM * (1 + 1e-6)
        if index != 1:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert float(grad_norm(run)) == 0
    state = [local_tensor(param) for param in run.parameters()]
    for param in run.parameters():
        kept = optimizer.state[param]
        state += [kept["step"], local_tensor(kept["exp_avg"]), local_tensor(kept["exp_avg_sq"])]
        if isinstance(param, torch.distributed.tensor.DTensor):
            assert kept["exp_avg"].placements == param.placements
    return norms, [tensor.clone() for tensor in state], left


CELLS = [
    Cell(mesh="dp_shard=4", microbatches=2),
    Cell(mesh="dp_shard=4", microbatches=2, zero=2, dtype="float32", tied=True, vocab=61),
    Cell(mesh="dp_shard=4", microbatches=3, zero=1, dtype="float32", bf16=True),
    Cell(mesh="dp_replicate=2 dp_shard=2", microbatches=2, recompute="full", dtype="float32"),
    Cell(mesh="tp=4", microbatches=2, sequence=True, qwen=True),
    Cell(mesh="dp_shard=2 tp=2", microbatches=2, dtype="float32", vocab=61),
    Cell(mesh="dp_shard=2 pp=2", microbatches=3, tied=True),
    Cell(mesh="pp=4", layers=8, microbatches=4, schedule="zbv", dtype="float32"),
    Cell(mesh="dp_shard=4 ep=2", layers=3, microbatches=2, moe=Moe(shared=24)),
]


def both(cell: Cell, resident: float) -> tuple[bool, bool, bool, float]:
    norms, state, stayed = trained(cell, None)
    offloaded_norms, offloaded, left = trained(cell, OptimizerOffload(resident=resident))
    same = all(torch.equal(a, b) for a, b in zip(state, offloaded, strict=True))
    return same, norms == offloaded_norms, left and not stayed, norms[0]


@pytest.mark.parametrize("cell", thin(CELLS, 3), ids=str)
def test_parameters_moments_and_norms_are_bit_identical_to_resident(cell: Cell) -> None:
    for same, same_norms, left, norm in pool(4).run(both, cell, 0.0):
        assert norm > MAX_NORM, "nothing was clipped"
        assert same and same_norms
        assert left or "pp" in cell.mesh


def test_part_of_the_states_may_stay() -> None:
    for same, same_norms, _, _ in pool(4).run(both, CELLS[5], 0.4):
        assert same and same_norms


class NoDTensors(TorchDispatchMode):
    """Inside, no operator sees a DTensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(issubclass(kind, DTensor) for kind in types), func
        return func(*args, **(kwargs or {}))


def beside_torch(cell: Cell) -> bool:
    """Whether `adamw` and torch's own on DTensors make the same bits of parameters and state in three steps."""
    ours, theirs = start(cell), start(cell)
    optimizer = mk.adamw(ours, lr=1e-2)
    names = {param: name for name, param in ours.named_parameters()}
    same = dict(theirs.named_parameters())
    groups = [
        {**group, "params": [same[names[param]] for param in group["params"]]} for group in optimizer.param_groups
    ]
    peer = torch.optim.AdamW(groups, fused=True)
    for batch in batches(cell):
        for run, each, watch in ((ours, optimizer, NoDTensors()), (theirs, peer, nullcontext())):
            run.forward_backward(own_rows(batch, run.mesh))
            with watch:
                each.step()
            each.zero_grad()
    found = []
    for param, name in names.items():
        mine, its = optimizer.state[param], peer.state[same[name]]
        assert mine.keys() == its.keys()
        pairs = [(param, same[name]), *((mine[key], its[key]) for key in mine)]
        found += [torch.equal(local_tensor(a), local_tensor(b)) for a, b in pairs]
        found += [getattr(a, "placements", None) == getattr(b, "placements", None) for a, b in pairs]
    return all(found)


@pytest.mark.parametrize("cell", [CELLS[3], Cell(mesh="dp_shard=2 tp=2", dtype="float32", vocab=61)], ids=str)
def test_the_resident_one_updates_parts_bit_for_bit_as_torch_updates_the_whole(cell: Cell) -> None:
    assert all(pool(4).run(beside_torch, cell))


# ------------------------------------------------------------------------------------------------ one process


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 33), nn.Linear(33, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(11, 7, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
    model(x).float().square().mean().backward()


def test_a_bf16_model_follows_its_fp32_masters() -> None:
    """The oracle: fp32 AdamW on the gradients of the bf16 model, whose parameters are its values rounded."""
    model, oracle = net(torch.bfloat16), net(torch.bfloat16)
    masters = [param.detach().float() for param in oracle.parameters()]
    expected = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-4)
    moved = 0
    for step in range(20):
        for microbatch in range(2):  # summed in fp32
            for each in (model, oracle):
                backward(each, 2 * step + microbatch)
            for master, param in zip(masters, oracle.parameters(), strict=True):
                grad = param.grad.float()
                master.grad = grad if microbatch == 0 else master.grad + grad
                param.grad = None
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        for param, master in zip(oracle.parameters(), masters, strict=True):
            param.data.copy_(master)
        for param, master, mine in zip(oracle.parameters(), masters, model.parameters(), strict=True):
            assert torch.equal(mine, param)
            assert torch.equal(optimizer.state[mine]["master"], master)
            moved += int((master != param.float()).sum())
    assert moved, "no master has more bits than its parameter"


@pytest.mark.parametrize("first", ["optimizer", "parameters"])
def test_a_bf16_model_goes_on_after_a_load_with_all_bits_of_its_masters(first: str) -> None:
    """The oracle: fp32 AdamW on the gradients of the bf16 model, which nothing interrupts."""
    model, oracle = net(torch.bfloat16), net(torch.bfloat16)
    masters = [param.detach().float() for param in oracle.parameters()]
    expected = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-4)
    for step in range(6):
        if step == 3:
            saved = optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
            model = net(torch.bfloat16)
            optimizer = OffloadedAdamW(model.parameters(), lr=1e-4)
            if first == "optimizer":
                optimizer.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
            if first == "parameters":
                optimizer.load_state_dict(saved[0])
        for each in (model, oracle):
            backward(each, step)
        for master, param in zip(masters, oracle.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
        for param, master in zip(oracle.parameters(), masters, strict=True):
            param.data.copy_(master)
    for mine, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(optimizer.state[mine]["master"], master)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters)


def test_a_step_uses_its_gradients_up() -> None:
    """Without zero_grad: the next step has the gradients of its own backward, and one without a backward does nothing."""
    model, oracle = net(), net()
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(oracle.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(3):
        for each in (model, oracle):
            backward(each, step)
        optimizer.step()
        optimizer.step()
        expected.step()
        expected.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), oracle.parameters(), strict=True))


def test_masters_follow_values_given_after_the_optimizer_was_built() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        early, late = net(dtype), net(dtype)
        first = OffloadedAdamW(early.parameters(), lr=1e-3)
        for model in (early, late):
            with torch.no_grad():
                for index, param in enumerate(model.parameters()):
                    nn.init.normal_(param, generator=torch.Generator().manual_seed(index))
        second = OffloadedAdamW(late.parameters(), lr=1e-3)
        for step in range(3):
            if step == 2:  # and in the middle
                for model in (early, late):
                    with torch.no_grad():
                        model.first.weight[0] += 1
            for model, optimizer in ((early, first), (late, second)):
                backward(model, step)
                optimizer.step()
        for a, b in zip(early.parameters(), late.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("delayed", [False, True])
def test_an_update_uses_its_threads_and_leaves_everybody_else_s(delayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the same parameters; what this thread uses is as before, in a step and after it."""
    used: list[int] = []
    update = host_offload.adamw

    def watched(*args: Any, **kwargs: Any) -> None:
        used.append(torch.get_num_threads())
        update(*args, **kwargs)

    monkeypatch.setattr(host_offload, "adamw", watched)
    before, results = torch.get_num_threads(), []
    for threads in (None, before + 2):
        used.clear()
        model = net()
        optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, delayed=delayed, threads=threads)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            assert torch.get_num_threads() == before
        optimizer.finish()
        assert set(used) == {threads or before}
        assert torch.get_num_threads() == before
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(("cores", "ranks", "share"), [(64, "8", 8), (2, "4", 1), (7, None, 7)])
def test_a_rank_s_share_of_the_cores(
    cores: int, ranks: str | None, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores_of_rank() == share


def test_a_state_dict_goes_back_and_forth_between_host_and_device() -> None:
    model, other = net(), net()
    optimizer = OffloadedAdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    resident = torch.optim.AdamW(other.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(4):
        if step == 2:
            saved, theirs = optimizer.state_dict(), resident.state_dict()
            optimizer = OffloadedAdamW(model.parameters(), lr=0.5)
            resident = torch.optim.AdamW(other.parameters(), lr=0.5, fused=True)
            optimizer.load_state_dict(theirs)
            resident.load_state_dict({**saved, "param_groups": theirs["param_groups"]})
        for each, held in ((model, optimizer), (other, resident)):
            backward(each, step)
            held.step()
            held.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_newest_optimizer_gets_the_gradients_and_the_older_one_says_so() -> None:
    model = net()
    older = OffloadedAdamW(model.parameters(), lr=1e-3)
    newer = OffloadedAdamW(model.parameters(), lr=1e-3)
    before = model.first.weight.detach().clone()
    backward(model, 0)
    with pytest.raises(mk.errors.StepError, match="a newer optimizer takes these parameters' gradients"):
        older.step()
    newer.step()
    assert not torch.equal(model.first.weight, before)
    del older, newer
    gc.collect()
    backward(model, 1)
    assert model.first.weight.grad is not None, "the hook outlived its optimizer"


@given(st.lists(st.integers(0, 1000), max_size=12), st.floats(0, 1))
def test_the_resident_share_is_met_to_half_of_the_smallest_tensor_left(sizes: list[int], share: float) -> None:
    stays = choose_resident(sizes, share)
    held = sum(size for size, here in zip(sizes, stays, strict=True) if here)
    left = [size for size, here in zip(sizes, stays, strict=True) if not here]
    if held <= share * sum(sizes):
        assert not left or share * sum(sizes) - held <= min(left) / 2 or min(left) == 0
    assert choose_resident(sizes, 0) == [size == 0 for size in sizes] and all(choose_resident(sizes, 1))


def test_the_share_is_what_the_host_cannot_hide_or_what_fits() -> None:
    common: dict[str, Any] = {"parameters": 10**9, "host_s_per_parameter": 0.5e-9, "link_bytes_per_s": 50e9}
    assert resident_share(**common, device_bytes=1e12) == 1  # nothing hides it and all fits
    assert resident_share(**common, device_bytes=3e9) == pytest.approx(0.25)  # 12 bytes each
    assert resident_share(**common, device_bytes=1e12, hidden_s=0.4) == pytest.approx(0.2)  # of 0.5 s
    assert resident_share(**common, device_bytes=1e12, hidden_s=0.6) == 0
    slow_link = {**common, "link_bytes_per_s": 8e9}  # 1 s for gradients and parameters
    assert resident_share(**slow_link, device_bytes=1e12, hidden_s=0.6) == pytest.approx(0.4)


@given(st.lists(st.integers(0, 5000), max_size=30))
def test_host_tensors_lie_in_chunks_without_overlap(sizes: list[int]) -> None:
    places, chunks = place_tensors(sizes, chunk_bytes=1024)
    assert all(chunk & (chunk - 1) == 0 for chunk in chunks)
    end: dict[int, int] = {}
    for place, size in zip(places, sizes, strict=True):
        assert place.offset >= end.get(place.chunk, 0) and place.offset % 64 == 0
        end[place.chunk] = place.offset + size
        assert end[place.chunk] <= chunks[place.chunk]


# ------------------------------------------------------------------------------------------------ checkpoints


def policy(kind: str) -> mk.MemoryPolicy:
    offload = {"resident": None, "offload": OptimizerOffload(), "half": OptimizerOffload(resident=0.5)}[kind]
    return mk.MemoryPolicy(optimizer=OptimizerPolicy(offload=offload))


def whole_state(run: mk.Run, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    if isinstance(optimizer, OffloadedAdamW):
        optimizer.finish()  # a pending update writes the moments while they are read
    whole = {}
    for name, param in run.named_parameters():
        whole[name] = full_tensor(param).clone()
        whole |= {f"{name}/{key}": full_tensor(value).clone() for key, value in optimizer.state[param].items()}
    return whole


def two_steps(cell: Cell, run: mk.Run, optimizer: torch.optim.Optimizer, *, first: int) -> None:
    for batch in (batches(cell) * 2)[first : first + 2]:
        run.forward_backward(own_rows(batch, run.mesh), microbatches=cell.microbatches)
        mk.clip_grad_norm(run, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def save_half_way(folder: str, cell: Cell) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = start(cell)
    optimizer = mk.adamw(run, lr=1e-2)
    two_steps(cell, run, optimizer, first=0)
    with mk.Checkpointer(folder) as checkpoints:
        checkpoints.save(2, run, optimizer)
        saved = whole_state(run, optimizer)
        two_steps(cell, run, optimizer, first=2)
    return saved, whole_state(run, optimizer)


def resume(folder: str, cell: Cell) -> tuple[dict[str, Tensor], dict[str, Tensor]] | str:
    run = start(cell)
    optimizer = mk.adamw(run, lr=0.5)
    try:
        mk.Checkpointer(folder).load(run, optimizer)
    except mk.errors.CheckpointError as error:
        return str(error)
    loaded = whole_state(run, optimizer)
    two_steps(cell, run, optimizer, first=2)
    return loaded, whole_state(run, optimizer)


TOL_FP64 = 1e-9  # two AdamW steps on; only the order of summation differs


@pytest.mark.parametrize(
    ("saving", "loading", "mesh", "dtype"),
    thin(
        [
            ("offload", "resident", "dp_shard=2 tp=2", "float64"),
            ("offload", "offload", "dp_shard=2 tp=2", "float64"),
            ("resident", "offload", "tp=4", "float64"),
            ("resident", "offload", "dp_shard=2 tp=2", "float64"),
            ("offload", "half", "dp_shard=4", "float64"),
            ("offload", "offload", "dp_shard=2 tp=2", "bfloat16"),
        ],
        4,
    ),
)
def test_a_checkpoint_goes_on_exactly_from_host_to_device_and_onto_another_mesh(
    tmp_path: Path, saving: str, loading: str, mesh: str, dtype: str
) -> None:
    cell = Cell(mesh="dp_shard=2 tp=2", microbatches=2, vocab=61, dtype=dtype, memory=policy(saving))
    saved, later = pool(4).run(save_half_way, str(tmp_path), cell)[0]
    for loaded, resumed in pool(4).run(resume, str(tmp_path), replace(cell, mesh=mesh, memory=policy(loading))):
        assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
        for name, value in later.items():
            if mesh == cell.mesh:
                assert torch.equal(resumed[name], value), name
            else:
                torch.testing.assert_close(resumed[name], value, rtol=0, atol=TOL_FP64)


def test_masters_are_not_given_to_an_optimizer_that_has_none(tmp_path: Path) -> None:
    cell = Cell(mesh="dp_shard=2 tp=2", dtype="bfloat16", memory=policy("offload"))
    pool(4).run(save_half_way, str(tmp_path), cell)
    answer = pool(4).run(resume, str(tmp_path), replace(cell, memory=policy("resident")))[0]
    assert "was saved as 'fp32 masters', and this run's optimizer holds it as 'AdamW'" in answer


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: OptimizerOffload(resident=1.5), r"resident=1.5\): a share of the states, from 0 to 1"),
        (lambda: OptimizerOffload(resident=0.5, delayed=True), "updated at once and the rest a step late"),
        (lambda: OptimizerPolicy(states="2bit"), "states='2bit'.: choose one of 'fp32', '8bit'"),
        (lambda: OptimizerPolicy(states="8bit", offload=OptimizerOffload()), "the host keeps fp32 masters and moments"),
        (lambda: OffloadedAdamW(nn.Linear(2, 2, device="meta").parameters()), "a parameter is on meta"),
        (
            lambda: OffloadedAdamW([torch.zeros(2, requires_grad=True)]).add_param_group({"params": []}),
            "allocated once",
        ),
    ],
)
def test_what_does_not_work_is_refused(make: Any, match: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=match):
        make()
