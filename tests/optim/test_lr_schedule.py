import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_wsd_schedule

from meshkit.errors import MeshkitError
from meshkit.optim import LR_SCHEDULES, lr_factor, lr_schedule

TOL_FP64 = 1e-12  # the same formula, associated differently


def factors(kind: str, steps: int, **options) -> list[float]:
    return [lr_factor(step, kind=kind, **options) for step in range(steps)]


def oracle(build, steps: int, **options) -> list[float]:
    """The factors transformers gives to steps 0, 1, ... of a run."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = build(optimizer, **options)
    seen = []
    for _ in range(steps):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    "kind, build", [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_decay_equals_that_of_transformers_and_warm_up_is_one_step_ahead_of_it(kind, build, warmup):
    theirs = oracle(build, 45, num_warmup_steps=warmup, num_training_steps=40)
    ours = factors(kind, 45, warmup_steps=warmup, total_steps=40)
    assert ours[warmup:40] == pytest.approx(theirs[warmup:40], abs=TOL_FP64)
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], abs=TOL_FP64)
    assert ours[40:] == [0.0] * 5


def test_warmup_stable_decay_equals_that_of_transformers():
    theirs = oracle(
        get_wsd_schedule,
        45,
        num_warmup_steps=5,
        num_decay_steps=8,
        num_training_steps=40,
        min_lr_ratio=0.1,
        decay_type="linear",
    )
    ours = factors("wsd", 45, warmup_steps=5, total_steps=40, decay_steps=8, min_factor=0.1)
    assert ours[5:] == pytest.approx(theirs[5:], abs=TOL_FP64)


def test_closed_forms_at_chosen_steps():
    options = {"warmup_steps": 10, "total_steps": 110, "min_factor": 0.2}
    assert [lr_factor(step, kind="linear", **options) for step in (0, 4, 9, 10, 60, 110, 999)] == pytest.approx(
        [0.1, 0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
    )
    assert [lr_factor(step, kind="cosine", **options) for step in (10, 60, 110)] == pytest.approx([1.0, 0.6, 0.2])
    assert lr_factor(35, kind="cosine", **options) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert [lr_factor(step, kind="constant", **options) for step in (9, 10, 109, 999)] == [1.0] * 4
    # The default decay is a tenth of 110 steps: it starts at step 99.
    assert [lr_factor(step, kind="wsd", **options) for step in (98, 99, 110)] == pytest.approx([1.0, 1.0, 0.2])
    assert lr_factor(100, kind="wsd", **options) == pytest.approx(1 - 0.8 / 11)


@given(
    kind=st.sampled_from(LR_SCHEDULES),
    total=st.integers(1, 60),
    warmup=st.integers(0, 60),
    low=st.floats(0, 1),
)
def test_no_step_of_a_run_is_idle_and_the_factor_rises_then_falls(kind, total, warmup, low):
    warmup = min(warmup, total)
    run = factors(kind, total + 5, warmup_steps=warmup, total_steps=total, min_factor=low)
    assert all(0 < factor <= 1 for factor in run[:total])
    assert max(run) == 1.0
    assert run[:warmup] == sorted(run[:warmup])
    assert run[warmup:] == sorted(run[warmup:], reverse=True)
    assert run[total:] == [1.0 if kind == "constant" else low] * 5


def run_of(optimizer_class, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = optimizer_class([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.03}], lr=0.1)
    return model, optimizer, lr_schedule(optimizer, **options)


def train(model, optimizer, schedule, first: int, last: int) -> list[list[float]]:
    rates = []
    for step in range(first, last):
        rates.append([group["lr"] for group in optimizer.param_groups])
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 3, dtype=torch.float64, generator=generator)).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return rates


@pytest.mark.parametrize("schedule_first", [True, False])
@pytest.mark.parametrize("stop", [2, 9])  # in warm-up and after it
@pytest.mark.parametrize("kind", LR_SCHEDULES)
def test_continuing_equals_never_having_stopped_bit_for_bit(kind, stop, schedule_first):
    options = {"kind": kind, "warmup_steps": 5, "total_steps": 20, "min_factor": 0.1}
    straight = run_of(torch.optim.AdamW, **options)
    rates = train(*straight, 0, 20)

    first = run_of(torch.optim.AdamW, **options)
    assert train(*first, 0, stop) == rates[:stop]
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    model_state, optimizer_state, schedule_state = torch.load(file, weights_only=True)

    model, optimizer, schedule = run_of(torch.optim.AdamW, **options)
    model.load_state_dict(model_state)
    if schedule_first:
        schedule.load_state_dict(schedule_state)
    optimizer.load_state_dict(optimizer_state)
    if not schedule_first:
        schedule.load_state_dict(schedule_state)
    assert train(model, optimizer, schedule, stop, 20) == rates[stop:]
    for ours, theirs in zip(model.parameters(), straight[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_every_group_keeps_its_own_peak():
    model, optimizer, schedule = run_of(torch.optim.SGD, kind="linear", warmup_steps=4, total_steps=12)
    assert train(model, optimizer, schedule, 0, 8) == [
        pytest.approx([0.1 * factor, 0.03 * factor]) for factor in factors("linear", 8, warmup_steps=4, total_steps=12)
    ]


def test_the_state_is_numbers_only():
    _, _, schedule = run_of(torch.optim.SGD, kind="cosine", warmup_steps=4, total_steps=12)
    assert schedule.state_dict()["lr_lambdas"] == [None, None]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "cosin"}, "no learning-rate schedule 'cosin'. Did you mean 'cosine'"),
        ({"kind": "polynomial"}, "no learning-rate schedule 'polynomial'. Choose from constant, linear, cosine, wsd"),
        ({"warmup_steps": 21}, "warmup_steps=21 does not fit into total_steps=20. Use 0 to 20"),
        ({"warmup_steps": -1}, "warmup_steps=-1 does not fit"),
        ({"total_steps": 0, "warmup_steps": 0}, "total_steps=0: a run has at least 1 step"),
        ({"min_factor": 1.5}, "min_factor=1.5 is a fraction"),
        ({"min_factor": math.nan}, "min_factor=nan is a fraction"),
        ({"decay_steps": 5}, "decay_steps=5 is for kind='wsd'; kind='linear'"),
        ({"kind": "wsd", "decay_steps": 18}, "decay_steps=18 with warmup_steps=3 does not fit .* Use 0 to 17"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_when_the_schedule_is_built(change, message):
    with pytest.raises(MeshkitError, match=message):
        run_of(torch.optim.SGD, **{"kind": "linear", "warmup_steps": 3, "total_steps": 20, **change})


def test_a_step_before_the_first_is_refused():
    with pytest.raises(MeshkitError, match="step=-1 of total_steps=20"):
        lr_factor(-1, kind="linear", warmup_steps=3, total_steps=20)
