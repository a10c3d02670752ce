"""A checkpoint under another policy: refused before anything changes, but for what changes nothing that was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshkit as mk
from meshkit.checkpoint import Checkpointer
from meshkit.errors import CheckpointError
from meshkit.optim.outer import CO2, DiLoCo, LocalSGD, Policy, QuadraticRule
from meshkit.optim.outer._saved_policy import policy_text, refuse_other_policy
from tests.optim.outer.test_resume import STEPS, build, digest, train
from tests.world import pool

STREAMING = DiLoCo(every=6, fragments=3, delay=2)
REFUSED: list[tuple[Policy, Policy, str]] = [
    # saved, asked, what is said
    (LocalSGD(every=4), DiLoCo(every=4), r"saved under LocalSGD, and this run has DiLoCo"),
    (STREAMING, CO2(every=3), r"saved under DiLoCo, and this run has CO2"),
    (DiLoCo(every=6), DiLoCo(every=2), r"under DiLoCo\(every=6\), and this run has DiLoCo\(every=2\)"),
    (
        STREAMING,
        DiLoCo(every=6, fragments=2, delay=2),
        r"DiLoCo\(fragments=3\), and this run has DiLoCo\(fragments=2\)",
    ),
    (STREAMING, DiLoCo(every=6, fragments=3), r"DiLoCo\(delay=2\), and this run has DiLoCo\(delay=0\)"),
    (DiLoCo(every=4), DiLoCo(every=4, wire="int8"), r"DiLoCo\(wire='full'\), and this run has DiLoCo\(wire='int8'\)"),
    (DiLoCo(wire="int8"), DiLoCo(wire="int8", feedback=False), r"DiLoCo\(feedback=True\), and this run has"),
    (DiLoCo(), DiLoCo(weights="equal"), r"DiLoCo\(weights='tokens'\), and this run has DiLoCo\(weights='equal'\)"),
    (LocalSGD(every=QuadraticRule(alpha=1.0, base=2)), LocalSGD(every=2), r"LocalSGD\(every=\{'alpha': 1.0"),
    (CO2(penalty="gap"), CO2(penalty="gap", lr=0.5), r"CO2\(lr=1.0\), and this run has CO2\(lr=0.5\)"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_another_policy_has_saved_is_refused_in_one_line(case: int) -> None:
    saved, asked, text = REFUSED[case]
    with pytest.raises(CheckpointError, match=text) as raised:
        refuse_other_policy([{"outer_steps": 3, "outer_policy": policy_text(saved)}], asked, prefix="outer_")
    assert "\n" not in str(raised.value) and "Give what was saved" in str(raised.value)
    refuse_other_policy([{"outer_steps": 3, "outer_policy": policy_text(saved)}], saved, prefix="outer_")
    refuse_other_policy([{}], asked, prefix="outer_")  # a run without an outer optimizer
    with pytest.raises(CheckpointError, match="a policy that it does not name"):
        refuse_other_policy([{"outer_steps": 3}], asked, prefix="outer_")


def refused(folder: str, cases: list[tuple[Policy, Policy, int]]) -> None:
    replica = mk.init_mesh("dp_replicate=2")["dp_replicate"].get_local_rank()
    for number, (saved, asked, stop) in enumerate(cases):
        with Checkpointer(f"{folder}/{number}-{replica}") as checkpoints:
            run, outer = build("dp_replicate=2", saved, seed=1)
            train(run, outer, range(0, stop))
            checkpoints.save(stop, run, outer)
            run, outer = build("dp_replicate=2", asked, seed=2)
            train(run, outer, range(0, 1))
            before = digest(outer)
            with pytest.raises(CheckpointError, match="the outer optimizer was saved under"):
                checkpoints.load(run, outer)
            assert digest(outer) == before  # nothing was loaded
            train(run, outer, range(1, 3))


def test_a_load_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    """Saved with a change in flight, which would have become the parameters, or moved others; and a longer period."""
    cases = [(DiLoCo(every=6, delay=2), LocalSGD(every=6), 7), (STREAMING, DiLoCo(every=6, fragments=2, delay=2), 3)]
    pool(2).run(refused, str(tmp_path), cases)


FREE: list[tuple[Policy, Policy, int]] = [
    (DiLoCo(every=6, delay=2, wire="int4"), DiLoCo(every=6, delay=2, wire="int4", lr=0.3, momentum=0.5, mixing=0.2), 7),
    (CO2(every=3), CO2(every=3, lr=0.5, momentum=0.4, clip=1e-3), 4),
]


def goes_on(folder: str, saved: Policy, asked: Policy, stop: int) -> bool:
    """Whether a run that resumes with other rates equals one whose rates were changed after that step."""
    replica = mk.init_mesh("dp_replicate=2")["dp_replicate"].get_local_rank()
    with Checkpointer(f"{folder}/{replica}") as checkpoints:
        run, outer = build("dp_replicate=2", saved, seed=1)
        train(run, outer, range(0, stop))
        checkpoints.save(stop, run, outer)
        outer.policy = asked
        train(run, outer, range(stop, STEPS))
        wanted = digest(outer)
        run, outer = build("dp_replicate=2", asked, seed=2)
        checkpoints.load(run, outer)
        train(run, outer, range(stop, STEPS))
    return digest(outer) == wanted


@pytest.mark.parametrize("case", range(len(FREE)))
def test_rates_of_the_outer_update_may_change_at_a_load_exactly(case: int, tmp_path: Path) -> None:
    assert all(pool(2).run(goes_on, str(tmp_path), *FREE[case]))
