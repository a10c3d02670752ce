"""A recipe whose answers workers write: one is killed, the trainer stops and starts anew, and no rollout is learnt twice."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.recipes.launch import ROOT, command_line, finish, read_losses, run, start_command

RECIPE = "examples/grpo.py"


def two_free_ports() -> int:
    """The first of two that follow one another."""
    while True:
        with closing(socket.socket()) as one, closing(socket.socket()) as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return int(port)


def flags(out: Path, port: int, **changes: object) -> list[str]:
    chosen = {
        "task": "reversal",
        "out": out,
        "sft-steps": 20,
        "steps": 6,
        "warmup-steps": 0,
        "lr": 1e-4,
        "prompts": 6,
        "samples": 4,
        "seq-len": 32,
        "eval-every": 6,
        "eval-prompts": 16,
        "staleness": 2,
        "correction": "tis",
        "worker-port": port,
        "worker-secret": out.parent / "secret",
        "worker-lease": 4,
    }
    return command_line(chosen, **changes)


@pytest.mark.parametrize("verified", [False, True])
def test_a_killed_worker_costs_no_step_and_a_trainer_that_starts_anew_finds_the_other(
    tmp_path: Path, verified: bool
) -> None:
    out, port = tmp_path / "run", two_free_ports()
    (tmp_path / "validators").write_text("hush, of validators")
    more = ["--worker-verify", "--validator-secret", str(tmp_path / "validators")] if verified else []
    (tmp_path / "secret").write_text("hush\n")
    worker = [sys.executable, "-m", "meshkit", "rollout-worker", f"http://127.0.0.1:{port}", "--secret-file"]
    workers = [start_command([*worker, str(tmp_path / "secret"), "--tokens", "1"]) for _ in range(2)]
    if verified:
        validator = [*worker[:3], "rollout-validator", *worker[4:], str(tmp_path / "validators")]
        workers.append(start_command(validator))
    killed = threading.Event()

    def kill() -> None:
        while 1 not in read_losses(out) and not killed.wait(0.02):
            pass
        os.kill(workers[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        status, output = run(1, RECIPE, *flags(out, port), *more, timeout_s=200, stop=(out, 3))
        assert status == 0 and "rollouts of workers, tokens at most 2 updates old." in output, output
        status, output = run(2, RECIPE, *flags(out, port, mesh="dp_shard=2"), *more, timeout_s=200)
        assert status == 0 and re.search("resume from step [34]", output), output
        for other in reversed(workers[1:]):
            status, said = finish(other, timeout_s=60)
            assert status == 0 and "the trainer has started anew" in said and "the run is over" in said, said
    finally:
        killed.set()
        thread.join()
        for process in workers:
            process.kill()
            process.communicate()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["answer_tokens"] > 0 for row in rows)
    taken = re.findall(r"([0-9]+) groups of this job were taken", said)
    assert int(taken[-1]) >= 6


def test_ppo_learns_from_workers_too(tmp_path: Path) -> None:
    out, port = tmp_path / "run", two_free_ports()
    (tmp_path / "secret").write_text("hush")
    worker = [sys.executable, "-m", "meshkit", "rollout-worker", f"http://127.0.0.1:{port}", "--secret-file"]
    process = start_command([*worker, str(tmp_path / "secret")])
    try:
        ppo = {"preset": "DECOUPLED_PPO", "critic-warmup": 1, "steps": 3, "kl": 0.05, "mesh": "tp=2"}
        status, output = run(2, "examples/ppo.py", *flags(out, port, **ppo), timeout_s=200)
        assert status == 0, output
        status, said = finish(process, timeout_s=60)
        assert status == 0 and "the run is over" in said, said
    finally:
        process.kill()
        process.communicate()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["value_loss"] > 0 for row in rows)
    assert not (out / "weights-of-workers").exists()


def test_a_cheating_worker_teaches_nothing_and_a_killed_validator_costs_no_step(tmp_path: Path) -> None:
    out, port = tmp_path / "run", two_free_ports()
    (tmp_path / "secret").write_text("hush")
    (tmp_path / "validators").write_text("hush, of validators")
    address, cheats = f"http://127.0.0.1:{port}", str(ROOT / "tests/recipes/cheating_worker.py")
    secret, trusted = ["--secret-file", str(tmp_path / "secret")], ["--secret-file", str(tmp_path / "validators")]
    started, told, over = {}, {}, threading.Event()

    def start(name: str, *command: str) -> None:
        started[name] = start_command([sys.executable, *command])

    def play() -> None:
        """The honest worker comes when the other is out, and the second validator when the first is killed, in step 3."""
        told["cheat"] = finish(started["cheat"], timeout_s=150)
        start("honest", "-m", "meshkit", "rollout-worker", address, *secret, "--tokens", "1")
        while 2 not in read_losses(out) and not over.wait(0.02):
            pass
        os.kill(started["validator"].pid, signal.SIGKILL)
        start("second", "-m", "meshkit", "rollout-validator", address, *trusted)
        over.wait(timeout=200)  # what a thread has started ends with it

    thread = threading.Thread(target=play)
    try:
        start("validator", "-m", "meshkit", "rollout-validator", address, *trusted, "--groups", "2")
        start("cheat", cheats, "rollout-worker", address, *secret)
        thread.start()
        verified = [*flags(out, port), "--worker-verify", "--validator-secret", str(tmp_path / "validators")]
        status, output = run(1, RECIPE, *verified, timeout_s=120)
        assert status == 0, output
        for name in ("honest", "second"):
            told[name] = finish(started[name], timeout_s=60)
    finally:
        over.set()
        thread.join(timeout=30)
        for process in started.values():
            process.kill()
            process.communicate()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    status, said = told["cheat"]
    assert status and "StepError (rank 0): the trainer refuses: /" in said and "Traceback" not in said, said
    assert "validators did not pass 2 groups of this worker, so it gets no more work of this run" in said, said
    (cheat,) = re.findall(r"(\S+) writes with weights of version 0", said)
    refused = re.findall(
        r"rollouts of worker (\S+): group [0-9]+: answer [0-9]+: (?:exponents|mantissa|log_probs): ", output
    )
    assert refused == [cheat, cheat] and "It gets no more work. Another one writes them." in output, output
    # All groups are learnt, and the honest one has written each of them.
    status, said = told["honest"]
    assert status == 0 and f"the run is over; {6 * 6} groups of this job were taken" in said, said
    status, said = told["second"]
    assert status == 0 and int(re.findall(r"the run is over; ([0-9]+) groups passed", said)[-1]) > 0, said


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"worker-secret": None}, "needs a --worker-secret, a file with a text that workers know too"),
        ({"staleness": 0, "correction": "none"}, "needs a --staleness of at least 1"),
        ({"sampler-mesh": "tp=1"}, "has workers that write. Leave --stream and --sampler-mesh out"),
        ({"kl": 0.1, "reference-mesh": "tp=1"}, "has one mesh that learns. Leave --reference-mesh"),
        ({"worker-secret": "nowhere"}, "there is no file nowhere"),
        ({"preset": "DAPO"}, "dynamic sampling (DAPO) asks again within a step"),
    ],
)
def test_a_mistake_ends_with_its_text(tmp_path: Path, change: dict, match: str) -> None:
    given = flags(tmp_path / "run", 0, **change)
    if change.get("worker-secret", 0) is None:
        at = given.index("--worker-secret")
        del given[at : at + 2]
    status, output = run(1, RECIPE, *given, timeout_s=100)
    assert status and match in output, output


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (
            ["--worker-verify"],
            "with --worker-verify needs a --validator-secret, a file with a text that validators know",
        ),
        (["--validator-secret", "secret"], "has a --validator-secret, which nobody uses without --worker-verify"),
        (["--worker-verify", "--validator-secret", "secret"], "any of whom could then pass itself"),
        (["--worker-verify", "--validator-secret", "nowhere"], "there is no file"),
    ],
)
def test_a_mistake_of_verification_ends_with_its_text(tmp_path: Path, words: list[str], match: str) -> None:
    (tmp_path / "secret").write_text("hush")
    given = [str(tmp_path / word) if word in ("secret", "nowhere") else word for word in words]
    status, output = run(1, RECIPE, *flags(tmp_path / "run", 0, sft_steps=1), *given, timeout_s=100)
    assert status and match in output, output


def test_a_worker_without_a_trainer_says_so(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush")
    (tmp_path / "empty").write_text(" ")
    worker = [sys.executable, "-m", "meshkit", "rollout-worker"]
    for args, match in (
        (["http://127.0.0.1:9", "--secret-file", "secret", "--patience", "1"], "has not answered /join for 1 s"),
        (["trainer:8000", "--secret-file", "secret"], "'trainer:8000' is no address. Give one as http://trainer:8000"),
        (["http://127.0.0.1:9", "--secret-file", "empty"], "it has no text"),
        (["http://127.0.0.1:9", "--secret-file", "none"], "there is no file none"),
        (
            ["rollout-validator", "http://127.0.0.1:9", "--secret-file", "secret", "--patience", "1"],
            "validator/join for 1 s",
        ),
        (
            ["rollout-validator", "http://127.0.0.1:9", "--secret-file", "secret", "--groups", "0"],
            "--groups 0: give a number",
        ),
    ):
        given = [str(tmp_path / each) if each in ("secret", "empty") else each for each in args]
        command = worker[:-1] if args[0] == "rollout-validator" else worker
        status, said = finish(start_command([*command, *given]), timeout_s=60)
        assert status != 0 and match in said and "Traceback" not in said, said
