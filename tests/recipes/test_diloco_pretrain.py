from __future__ import annotations

import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.optim.outer.jobs import jobs
from tests.recipes.launch import command_line, read_losses, run

RECIPE = "examples/diloco_pretrain.py"


def flags(corpus: Path, out: Path, **changes: object) -> list[str]:
    chosen = {
        "data": corpus,
        "out": out,
        "cache": corpus.parent / "cache",
        "steps": 10,
        "every": 4,
        "seq-len": 64,
        "global-batch": 6,
        "warmup-steps": 4,
        "save-every": 3,
        "keep": 9,
        "eval-every": 5,
        "sample-tokens": 8,
    }
    return command_line(chosen, **changes)


@pytest.mark.parametrize(
    ("ranks", "choices"),
    [
        (2, {"mesh": "dp_replicate=2"}),
        (4, {"mesh": "dp_replicate=2 tp=2", "fragments": 2, "delay": 1, "mixing": 0.5, "wire": "int4"}),
    ],
)
def test_a_run_that_goes_on_within_a_period_has_the_losses_of_one_straight_through(
    ranks: int, choices: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    status, output = run(ranks, RECIPE, *flags(corpus, tmp_path, **choices), "--explain")
    assert status == 0, output
    assert re.search(r"dp_replicate=2: DiLoCo\(every=4.*a period of 4 steps sends", output), output
    assert "bits per byte" in output and (tmp_path / "model-10" / "model.safetensors").exists()
    straight = read_losses(tmp_path)
    assert len(straight) == 10 and straight[10] < straight[1]
    for replica in range(2):
        for step in (6, 9, 10) if replica else (9, 10):  # of step 6 one replica has none, as if the job had been killed
            shutil.rmtree(tmp_path / "checkpoints" / f"replica-{replica}" / f"step-{step:08}")
    shutil.rmtree(tmp_path / "model-10")
    status, output = run(ranks, RECIPE, *flags(corpus, tmp_path, **choices))
    assert status == 0, output
    assert "resume from step 3" in output
    assert read_losses(tmp_path) == straight


def test_a_signal_is_asked_for_at_meetings_alone(corpus: Path, tmp_path: Path) -> None:
    status, output = run(2, RECIPE, *flags(corpus, tmp_path, mesh="dp_replicate=2", steps=40), stop=(tmp_path, 2))
    assert status == 0, output
    saved = re.search(r"saved step (\d+)", output)
    assert saved and int(saved[1]) % 4 == 0, output


def test_other_algorithms_train_and_what_does_not_fit_ends_with_a_line(corpus: Path, tmp_path: Path) -> None:
    for name in ("co2", "local-sgd"):
        chosen = flags(corpus, tmp_path / name, mesh="dp_replicate=2", algorithm=name, steps=5, every=2)
        status, output = run(2, RECIPE, *chosen)
        assert status == 0, output
        losses = read_losses(tmp_path / name)
        assert losses[5] < losses[1]
    status, output = run(2, RECIPE, *flags(corpus, tmp_path / "x", mesh="dp_replicate=2", fragments=3, every=4))
    assert status != 0 and "fragments=3): fragments meet at even distances" in output, output


def test_jobs_at_a_meeting_place_go_and_come_back_and_end_alike(corpus: Path, tmp_path: Path) -> None:
    """One gets a signal within a period, saves, and is started again from there: it goes on from the other's state."""
    with jobs(tmp_path, replicas=2, quorum=2, grace_s=30) as place, ThreadPoolExecutor() as threads:

        def job(name: str, stop: int | None = None) -> tuple[int, str]:
            common = {"mesh": "dp_shard=1", "steps": 30, "meeting_place": place.address, "save_every": 0}
            chosen = flags(corpus, tmp_path / name, **common)
            return run(1, RECIPE, *chosen, stop=None if stop is None else (tmp_path / name, stop))

        first = threads.submit(job, "a")
        status, output = threads.submit(job, "b", 5).result(120)
        assert status == 0 and (saved := re.search(r"saved step (\d+)", output)), output
        status, output = job("b")
        assert status == 0 and f"resume from step {saved[1]}" in output, output
        status, of_first = first.result(120)
        assert status == 0, of_first
        assert re.search(r"meeting place: replica \d on \S+ is gone; 1 replica meets", of_first), of_first
        models = [(tmp_path / name / "model-30" / "model.safetensors").read_bytes() for name in "ab"]
        assert models[0] == models[1]
        lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
        assert {line["step"] for line in lines if "replicas" in line} == {*range(4, 30, 4)}
        assert {line["replicas"] for line in lines if "replicas" in line} == {1, 2}


def test_jobs_that_all_stopped_while_something_was_in_flight_end_alike(corpus: Path, tmp_path: Path) -> None:
    with jobs(tmp_path, replicas=2, quorum=2, grace_s=30) as place, ThreadPoolExecutor() as threads:
        common = {"mesh": "dp_shard=1", "steps": 12, "meeting_place": place.address, "save_every": 5, "delay": 2}

        def job(name: str, stop: int | None = None) -> tuple[int, str]:
            return run(1, RECIPE, *flags(corpus, tmp_path / name, **common), stop=stop and (tmp_path / name, stop))

        for found in [threads.submit(job, name, 5) for name in "ab"]:
            status, output = found.result(120)
            assert status == 0 and "saved step" in output, output
        for name in "ab":  # of step 5 the mean of step 4 is there, and lands after step 6
            for folder in (tmp_path / name / "checkpoints").glob("step-*"):
                if folder.name != "step-00000005":
                    shutil.rmtree(folder)
        for found in [threads.submit(job, name) for name in "ab"]:
            status, output = found.result(120)
            assert status == 0 and "resume from step 5" in output, output
    models = [(tmp_path / name / "model-12" / "model.safetensors").read_bytes() for name in "ab"]
    assert models[0] == models[1]


def test_a_job_whose_meeting_place_is_gone_saves_what_it_has_and_goes_on_from_there(
    corpus: Path, tmp_path: Path
) -> None:
    with jobs(tmp_path, replicas=1, grace_s=5) as place, ThreadPoolExecutor() as threads:
        common = {"mesh": "dp_shard=1", "steps": 3000, "meeting_place": place.address, "save_every": 0, "eval_every": 0}
        job = threads.submit(run, 1, RECIPE, *flags(corpus, tmp_path / "a", **common))
        end = time.monotonic() + 60
        while 6 not in read_losses(tmp_path / "a"):
            assert time.monotonic() < end
            time.sleep(0.05)
        place.end_place()
        status, output = job.result(60)
        assert status == 1 and "is gone: it closed the connection. Start it again" in output, output
        saved = int(re.search(r"saved step (\d+)", output)[1])  # type: ignore[index]
        assert saved % 4 == 0  # a meeting is due
    (tmp_path / "again").mkdir()
    with jobs(tmp_path / "again", replicas=1, grace_s=5) as place:
        common |= {"steps": saved + 6, "meeting_place": place.address}
        status, output = run(1, RECIPE, *flags(corpus, tmp_path / "a", **common))
        assert status == 0 and f"resume from step {saved}" in output, output
        assert any(f"has the newest state, after step {saved};" in line for line in place.lines)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "replicas" in line][-1] == saved + 4
