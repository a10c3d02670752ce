"""Workers of other jobs write what the trainer's own weights would have written; what they cannot have written is refused."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import meshkit as mk
from meshkit.algos.dataflow import PROMPTED, Buffer, Call, Groups, Sample
from meshkit.algos.rollout import Sampling, Stopping
from meshkit.algos.workers import (
    GIVES,
    RolloutServer,
    VerifyPolicy,
    WorkerFlow,
    WorkerPolicy,
    prompt_of,
    read_answers,
    work,
)
from meshkit.algos.workers._wire import SIGNATURE, signature
from meshkit.algos.workers.command import build_published
from meshkit.data import REFERENCE_ALPHABET, character_tokenizer
from meshkit.errors import DataError, PlanError
from meshkit.models import LLAMA_PLAN, Llama, LlamaConfig
from tests.world import pool

TOKENIZER = character_tokenizer(REFERENCE_ALPHABET)
CONFIG = LlamaConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
SAMPLING = Sampling(max_new_tokens=7, stop_ids=(TOKENIZER.eos_id,))
SAMPLES, SEED, STEPS, SECRET = 2, 5, 5, "hush"
GROWTH = 1.02  # of all weights in a step
TOL_FP32 = 2e-5  # of log-probabilities: a decode step and a whole row add in other orders


def source(iteration: int) -> list[Sample]:
    """Uneven, and one iteration without any."""
    keys = range(10 * iteration, 10 * iteration + (3, 5, 0, 4, 1)[iteration % 5])
    return [{"key": key, "fields": {"prompt": f"{key}+{key}="}} for key in keys]


def flow_on(
    mesh: mk.Mesh,
    calls: list[Call],
    run: mk.Run | None,
    folder: Path,
    *,
    verify: VerifyPolicy | None = None,
    timeout: timedelta = timedelta(seconds=60),
    **changes: Any,
) -> WorkerFlow:
    policy: dict[str, Any] = {"port": 0, "folder": str(folder), "host": "127.0.0.1", "secret": SECRET, "lease_s": 3.0}
    policy |= {"gives": GIVES, "shard_bytes": 8192, "tokens": SAMPLES * SAMPLING.max_new_tokens}
    told = {"sampling": asdict(SAMPLING), "samples": SAMPLES, "seed": SEED, "precision": "fp32"}
    options: dict[str, Any] = {"staleness": 2, "total": STEPS, "source": source, "fields": PROMPTED} | changes
    return WorkerFlow(
        {"actor": mesh},
        calls,
        WorkerPolicy(**policy, settings=told, verify=verify),
        publish=lambda folder: run.export(folder, TOKENIZER) if run else _without_weights(folder),
        first=partial(prompt_of, tokenizer=TOKENIZER),
        read=partial(
            read_answers,
            tokenizer=TOKENIZER,
            sampling=SAMPLING,
            samples=SAMPLES,
            features=None if verify is None else CONFIG.hidden_size,
        ),
        timeout=timeout,
        **options,
    )


def _without_weights(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("of nothing")


def trained_by(trainers: tuple[str, range], workers: tuple[str, range], folder: str) -> Any:
    """What each step learnt on this data rank; None on workers."""
    meshes = {name: mk.init_mesh(spec, ranks=ranks) for name, (spec, ranks) in (("actor", trainers), ("w", workers))}
    mesh, learnt, run = meshes["actor"], list[list[dict[str, Any]]](), None
    if mesh.here:
        run = mk.parallelize(Llama(CONFIG), mesh, plan=LLAMA_PLAN)
        mk.init_weights(run.model, seed=0, plan=run.plan)

    def learn(samples: list[Sample]) -> None:
        assert run is not None
        learnt.append([{name: sample[name] for name in ("key", *GIVES)} for sample in samples])
        with torch.no_grad():
            for param in run.model.parameters():
                param.mul_(GROWTH)

    call = Call(name="learn", on="actor", function=learn, needs=(*PROMPTED, *GIVES), stage="train")
    flow = flow_on(mesh, [call], run, Path(folder) / "published")
    port = [flow.port]
    dist.broadcast_object_list(port, src=0)
    if mesh.here:
        for _ in range(STEPS):
            flow.step()
        assert dist.get_rank() or not (Path(folder) / "published").exists()
        return learnt
    work(
        meshes["w"],
        f"http://127.0.0.1:{port[0]}",
        Path(folder) / "got",
        secret=SECRET,
        build=partial(build_published, meshes["w"]),
        tokens=2,
        timeout_s=60,
        report=lambda line: None,
    )
    return None


def log_probs_of(version: int, prompt_ids: np.ndarray, ids: np.ndarray) -> torch.Tensor:
    """Of one device, by the weights after so many steps."""
    model = Llama(CONFIG)
    run = mk.parallelize(model, mk.init_mesh("", ranks=[dist.get_rank()]), plan=LLAMA_PLAN)
    mk.init_weights(run.model, seed=0, plan=run.plan)
    with torch.no_grad():
        for param in run.model.parameters():
            param.mul_(GROWTH**version)
        row = torch.from_numpy(np.concatenate([prompt_ids, ids]))[None]
        logits = run.model(row[:, :-1])
        chosen = logits.log_softmax(-1).gather(-1, row[:, 1:, None])[0, :, 0]
    return chosen[len(prompt_ids) - 1 :]


def differences(steps: list[list[dict[str, Any]]]) -> list[float]:
    """Of each answer: how far its log-probabilities are from those of the weights that it says wrote each token."""
    found = []
    for rows in steps:
        for row in rows:
            expected = torch.zeros(len(row["ids"]))
            for version in set(row["versions"].tolist()):
                of_version = torch.from_numpy(row["versions"] == version)
                expected[of_version] = log_probs_of(version, row["prompt_ids"], row["ids"])[of_version]
            found.append(float((torch.from_numpy(row["log_probs"]) - expected).abs().max()))
    return found


def steps_of(results: list[Any]) -> list[list[dict[str, Any]]]:
    """Of all data ranks, of which the trainers here have one rank each."""
    parts = [result for result in results if result is not None]
    return [[row for part in parts for row in part[step]] for step in range(STEPS)]


@pytest.mark.parametrize(
    ("trainers", "workers"),
    [(("dp_shard=2", range(2)), ("", range(2, 3))), (("", range(1)), ("tp=2", range(1, 3)))],
    ids=["two trainers", "a worker of two ranks"],
)
def test_each_answer_is_learnt_once_with_the_log_probs_of_the_weights_that_wrote_it(
    trainers: tuple[str, range], workers: tuple[str, range], tmp_path: Path
) -> None:
    steps = steps_of(pool(3).run(trained_by, trainers, workers, str(tmp_path)))
    rows = [row for step in steps for row in step]
    assert sorted(row["key"] for row in rows) == sorted(
        each["key"] for step in range(STEPS) for each in source(step) for _ in range(SAMPLES)
    )
    for number, step in enumerate(steps):
        assert len(step) == SAMPLES * len(source(number))
        for row in step:
            versions = row["versions"].tolist()
            assert versions == sorted(versions) and number - 2 <= versions[0] and versions[-1] <= number
            assert row["text"] == TOKENIZER.decode([id for id in row["ids"].tolist() if id != TOKENIZER.eos_id])
    assert len({version for row in rows for version in row["versions"].tolist()}) > 1  # new weights came
    (worst,) = pool(1).run(differences, steps)
    assert len(worst) == len(rows) and max(worst) <= TOL_FP32


# ------------------------------------------------------------------------------------------------------ what is refused


def served(verify: VerifyPolicy | None = None) -> RolloutServer:
    """Weights of version 2 are out, and all iterations may be begun."""
    buffer = Buffer(Groups(lambda iteration: 3, 4), 9)

    def first(group: int) -> Sample:
        return {"key": 7 + group, "fields": {"prompt": "1+2="}, "source": group}

    server = RolloutServer(
        buffer,
        host="127.0.0.1",
        port=0,
        secret=SECRET,
        lease_s=60.0,
        tokens=SAMPLES * SAMPLING.max_new_tokens,
        settings={"seed": 1},
        first=lambda group: prompt_of(first(group), TOKENIZER),
        read=lambda group, answers: read_answers(
            first(group),
            answers,
            tokenizer=TOKENIZER,
            sampling=SAMPLING,
            samples=SAMPLES,
            features=None if verify is None else CONFIG.hidden_size,
        ),
        verify=verify,
    )
    server.newest = 2
    return server


def sent(server: RolloutServer, path: str, body: bytes, *, secret: str = SECRET, **headers: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.putrequest("POST", path)
        given = {"Content-Length": str(len(body)), SIGNATURE: signature(secret, path, body), **headers}
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(body)
        response = connection.getresponse()
        return response.status, response.read().decode()


def asked(server: RolloutServer, path: str, message: Mapping[str, Any], *, secret: str = SECRET) -> tuple[int, Any]:
    status, text = sent(server, path, json.dumps({"life": server.life, **message}).encode(), secret=secret)
    return status, json.loads(text) if status == 200 else text


STOP = TOKENIZER.eos_id
GOOD = {"ids": [4, 5, STOP], "log_probs": [-1.0, -0.5, 0.0], "versions": [1, 1, 2]}
LONG = {"ids": [4] * 7, "log_probs": [-1.0] * 7, "versions": [1] * 7}
ODD = {
    "an id that is not there": ({**GOOD, "ids": [4, 10**6, STOP]}, "has the id 1000000, and there are"),
    "a negative id": ({**GOOD, "ids": [-1, 5, STOP]}, "has the id -1"),
    "no end": ({**GOOD, "ids": [4, 5, 6]}, "ends before or after its end"),
    "after its end": ({**GOOD, "ids": [4, STOP, STOP]}, "ends before or after its end"),
    "too long": ({name: [*value, value[0]] for name, value in LONG.items()}, "has 8 tokens, and at most 7 were asked"),
    "much too long": (
        {"ids": [4] * 1000, "log_probs": ["x"] * 1000, "versions": [None] * 1000},
        "has 1000 tokens, and at most 7 were asked for",
    ),
    "nothing": ({"ids": [], "log_probs": [], "versions": []}, "of 0 tokens ends before or after its end"),
    "a probability above 1": ({**GOOD, "log_probs": [-1.0, 0.1, 0.0]}, "has the log-probability 0.1"),
    "nan": ({**GOOD, "log_probs": [-1.0, float("nan"), 0.0]}, "has the log-probability nan"),
    "uneven": ({**GOOD, "log_probs": [-1.0]}, "has 3 ids, 1 log_probs and 3 versions"),
    "weights that are not out": ({**GOOD, "versions": [1, 2, 3]}, "where 1 to 2 can be"),
    "weights that are too old": ({**GOOD, "versions": [0, 1, 1]}, "where 1 to 2 can be"),
    "weights that go back": ({**GOOD, "versions": [2, 1, 2]}, "none is followed by an older one"),
    "texts": ({**GOOD, "ids": ["a", "b", "c"]}, "has the id 'a', which is no whole number"),
    "a text": ({**GOOD, "ids": "abc"}, "has no list of ids, 3 log_probs and 3 versions"),
    "ids with fractions": ({**GOOD, "ids": [4.9, 5, STOP]}, "has the id 4.9, which is no whole number"),
    "truths for ids": ({**GOOD, "ids": [4, True, STOP]}, "has the id True, which is no whole number"),
    "versions with fractions": ({**GOOD, "versions": [1, 1.9, 2]}, "has the version 1.9, which is no whole number"),
    "truths for versions": ({**GOOD, "versions": [True, True, 2]}, "has the version True, which is no whole number"),
    "an id of 400 digits": ({**GOOD, "ids": [10**399, 5, STOP]}, "has the id of more than 20 digits, and there are"),
    "a version of 400 digits": (
        {**GOOD, "versions": [10**399, 1, 1]},
        "has the version of more than 20 digits, which there is not",
    ),
    "a text for a log-probability": ({**GOOD, "log_probs": ["-1", -0.5, 0.0]}, "has the log-probability '-1'"),
    "what nobody draws": ({**GOOD, "log_probs": [-1e300, -0.5, 0.0]}, "has the log-probability -1e+300"),
    "no list": (7, "answer 1 is a int, not an object"),
    "none": (None, "answer 1 is a NoneType, not an object"),
    "other names": ({"tokens": [4]}, "there is no 'ids'"),
}


def test_what_a_worker_cannot_have_written_is_refused_and_written_by_another() -> None:
    server = served()
    try:
        status, given = asked(server, "/work", {"node": "a", "version": 1, "room": 2, "holds": []})
        assert status == 200 and [each["group"] for each in given["groups"]] == [0, 1] and not given["done"]
        assert given["groups"][0] == {"group": 0, "key": 7, "prompt_ids": [TOKENIZER.bos_id, *TOKENIZER.encode("1+2=")]}
        for what, (answer, match) in ODD.items():
            status, text = asked(server, "/rollouts", {"node": "a", "group": 0, "answers": [GOOD, answer]})
            assert status == 400 and match in text, (what, status, text)
            # Others get it, and what the node had beside it.
            status, again = asked(server, "/work", {"node": "a", "version": 1, "room": 2, "holds": []})
            assert [each["group"] for each in again["groups"]] == [0, 1], what
        refusals = server.refusals()
        assert len(refusals) == 10 and "a: group 0: " in refusals[0] and server.refusals() == []
        status, text = asked(server, "/rollouts", {"node": "a", "group": 0, "answers": [GOOD]})
        assert status == 400 and "1 answers came, and 2 were asked for" in text
        assert asked(server, "/rollouts", {"node": "a", "group": 5, "answers": [GOOD, LONG]}) == (200, {"taken": False})
        asked(server, "/work", {"node": "b", "version": 1, "room": 1, "holds": []})
        assert asked(server, "/rollouts", {"node": "b", "group": 0, "answers": [GOOD, LONG]}) == (200, {"taken": True})
        assert asked(server, "/rollouts", {"node": "a", "group": 0, "answers": [GOOD, LONG]}) == (200, {"taken": False})
        ((group, samples),) = server.arrived()
        assert group == 0 and [sample["truncated"] for sample in samples] == [False, True]
        assert [sample["text"] for sample in samples] == [TOKENIZER.decode([4, 5]), TOKENIZER.decode([4] * 7)]
        assert server.workers() == ["a", "b"]
    finally:
        server.close()


SAME = {"ids": [4] * 6 + [STOP], "log_probs": [-5.0] * 7, "versions": [1] * 7}


def test_what_is_drawn_once_does_not_come_twice() -> None:
    sample = {"key": 1, "fields": {"prompt": "1+2="}}

    def read(answers: list[dict[str, Any]], **changes: Any) -> list[Sample]:
        sampling = replace(SAMPLING, **changes)
        return read_answers(sample, answers, tokenizer=TOKENIZER, sampling=sampling, samples=2)

    with pytest.raises(DataError, match="answers 0 and 1 are the same, of a log-probability of -35: nobody draws one"):
        read([SAME, SAME])
    # A probable one does, and so does what the sampling leaves no choice about.
    for name, log_prob in (("probable", -4.0), ("greedy", -5.0), ("filtered", -5.0)):
        again = {**SAME, "log_probs": [log_prob] * 7}
        changes = {"greedy": {"temperature": 0.0}, "filtered": {"top_k": 1}}.get(name, {})
        assert len(read([again, again], **changes)) == 2


@pytest.mark.parametrize("strings", [(), ("\n\n",)])
def test_a_long_answer_is_read_in_a_time_that_grows_as_it_does(strings: tuple[str, ...]) -> None:
    """By what is asked of the ids and of the decoder, not by seconds."""

    class Counted(list[int]):
        read = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            Counted.read += len(found) if isinstance(index, slice) else 1
            return Counted(found) if isinstance(index, slice) else found

    counts = []
    for tokens in (500, 1000):
        sampling = Sampling(max_new_tokens=tokens, stop_ids=(STOP,), stop_strings=strings)
        Counted.read = 0
        assert Stopping(sampling, TOKENIZER.decode).ends_after(Counted([4] * tokens)) == (tokens, "length")
        counts.append(Counted.read)
    assert counts[1] < 2.2 * counts[0] and counts[1] < 1000 * 50


@given(
    ids=st.lists(st.integers(0, 30), max_size=20),
    most=st.integers(1, 15),
    stops=st.sets(st.integers(0, 30), max_size=3),
    strings=st.sets(st.sampled_from(["1", "+2", "33", "="]), max_size=2),
)
@settings(deadline=None)
def test_where_an_answer_ends_is_where_its_tokens_one_by_one_say(
    ids: list[int], most: int, stops: set[int], strings: set[str]
) -> None:
    sampling = Sampling(max_new_tokens=most, stop_ids=tuple(stops), stop_strings=tuple(strings))
    stopping = Stopping(sampling, TOKENIZER.decode)
    reasons = ((count, stopping.reason(ids[:count])) for count in range(1, len(ids) + 1))
    expected = next(((count, reason) for count, reason in reasons if reason), (len(ids), None))
    assert stopping.ends_after(ids) == expected


def test_the_server_answers_others_while_it_reads_what_a_worker_brought() -> None:
    server = served()
    reading, go_on = threading.Event(), threading.Event()
    read = server._read_answers

    def slowly(group: int, answers: Any) -> list[Sample]:
        reading.set()
        assert go_on.wait(30)
        return read(group, answers)

    server._read_answers = slowly
    try:
        asked(server, "/work", {"node": "a", "version": 1, "room": 2, "holds": []})
        told: list[Any] = []
        message = {"node": "a", "group": 0, "answers": [GOOD, LONG]}
        thread = threading.Thread(target=lambda: told.append(asked(server, "/rollouts", message)))
        thread.start()
        assert reading.wait(30)
        assert server.lock.acquire(timeout=5)  # the trainer looks
        server.lock.release()
        assert asked(server, "/work", {"node": "b", "version": 1, "room": 1, "holds": []})[0] == 200
        go_on.set()
        thread.join()
        assert told == [(200, {"taken": True})]
        assert [group for group, _ in server.arrived()] == [0]
    finally:
        go_on.set()
        server.close()


def test_a_worker_that_is_slower_than_its_lease_keeps_what_it_writes() -> None:
    """It is not given a second time, and another worker does not get it either."""
    server = served()
    server.leases.lease_s = 0.2
    try:
        _, given = asked(server, "/work", {"node": "a", "version": 1, "room": 2, "holds": []})
        assert [each["group"] for each in given["groups"]] == [0, 1]
        time.sleep(0.4)
        assert server.leases.expire() == [0, 1]
        server.leases.lease_s = 60.0
        _, given = asked(server, "/work", {"node": "a", "version": 1, "room": 1, "holds": [0, 1]})
        assert [each["group"] for each in given["groups"]] == [2]
        _, given = asked(server, "/work", {"node": "b", "version": 1, "room": 1, "holds": []})
        assert [each["group"] for each in given["groups"]] == [3]
        assert asked(server, "/rollouts", {"node": "a", "group": 0, "answers": [GOOD, LONG]}) == (200, {"taken": True})
    finally:
        server.close()


def resumed(changes: list[dict[str, Any]], folder: str) -> list[str]:
    """What a flow says of a state that another has left; the last iteration has no prompts."""
    mesh, found = mk.init_mesh(), []
    calls = [Call(name="learn", on="actor", function=lambda samples: None, needs=PROMPTED, stage="train")]
    flow = flow_on(mesh, calls, None, Path(folder), total=3, source=lambda step: source((4, 1, 2)[step]))
    server = flow._server
    assert server is not None
    for node in ("a", "b"):
        server.newest = 0
        _, given = asked(server, "/work", {"node": node, "version": 0, "room": 3, "holds": []})
        for each in given["groups"]:
            asked(
                server,
                "/rollouts",
                {"node": node, "group": each["group"], "answers": [{**GOOD, "versions": [0] * 3}] * 2},
            )
    flow.step()
    state = flow.state_dict()
    for _ in range(2):
        flow.step()
    assert flow.iteration == 3
    for change in changes:
        again = flow_on(
            mesh, calls, None, Path(folder), **{"total": 3, "source": lambda step: source((4, 1, 2)[step]), **change}
        )
        try:
            again.load_state_dict(state)
            found.append("")
        except DataError as error:
            found.append(str(error))
        again.close()
    return found


def test_a_run_of_other_prompts_or_fewer_steps_does_not_go_on(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"total": 1}, {"staleness": 1}, {"staleness": 4}]
    (found,) = pool(1).run(resumed, changes, str(tmp_path / "published"))
    matches = ("", "Give as many as it had", "Give at least that staleness", "")
    for text, match in zip(found, matches, strict=True):
        assert match in text and bool(text) == bool(match), text


def test_who_does_not_know_the_secret_and_what_is_no_message_is_refused() -> None:
    server = served()
    asked_for = {"node": "a", "version": 1, "room": 2, "holds": [], "life": server.life}
    message = json.dumps(asked_for).encode()
    try:
        assert sent(server, "/work", message, secret="else") == (
            403,
            "the message is not signed by the secret that the trainer has",
        )
        # A signature is of one path.
        assert sent(server, "/leave", message, **{SIGNATURE: signature(SECRET, "/work", message)})[0] == 403
        for body, match in (
            (b"", "Expecting value"),
            (b"\xff", "utf-8"),
            (b"[" * 10**5, "recursion"),
            (b"[]", "list indices"),
            (b"{}", "there is no 'life'"),
            (json.dumps({"life": server.life}).encode(), "there is no 'node'"),
            (json.dumps({**asked_for, "version": "x"}).encode(), "'x' is no whole number"),
            (json.dumps({**asked_for, "version": True}).encode(), "True is no whole number"),
            (json.dumps({**asked_for, "room": 1e999}).encode(), "inf is no whole number"),
            (json.dumps({**asked_for, "holds": [1.5]}).encode(), "1.5 is no whole number"),
            (json.dumps({**asked_for, "node": "a\nb: group 1: forged"}).encode(), "of a node is printable text of 1"),
            (json.dumps({**asked_for, "node": ["a"]}).encode(), "of a node is printable text of 1"),
            (json.dumps({**asked_for, "node": "a" * 201}).encode(), "of a node is printable text of 1 to 200"),
            (json.dumps({**asked_for, "node": ""}).encode(), "of a node is printable text of 1 to 200"),
        ):
            status, text = sent(server, "/work", body)
            assert status == 400 and match in text, (body[:40], status, text)
        assert sent(server, "/elsewhere", message)[0] == 400
        assert sent(server, "/work", b"", **{"Content-Length": str(2**19)})[0] == 413
        assert sent(server, "/work", b"", **{"Content-Length": "many"})[0] == 411
        # Weights that are not out, or a room that is none, begin nothing; and the server lives.
        for change in ({"version": 3}, {"version": -1}, {"room": -5}):
            _, given = asked(server, "/work", {**asked_for, **change})
            assert given["groups"] == []
        assert asked(server, "/work", {**asked_for, "life": "before"}) == (200, {"rejoin": True})
        assert asked(server, "/join", {}) == (200, {"seed": 1, "life": server.life})
    finally:
        server.close()


def refusals() -> list[str]:
    mesh, found = mk.init_mesh(), []
    calls = [Call(name="learn", on="actor", function=lambda samples: None, needs=PROMPTED, stage="train")]
    policy: dict[str, Any] = {
        "port": 0,
        "folder": Path("never"),
        "secret": SECRET,
        "settings": {},
        "gives": GIVES,
        "tokens": 9,
    }
    given: dict[str, Any] = {"source": source, "fields": PROMPTED, "total": 3, "staleness": 1, "publish": print}
    given |= {"first": print, "read": print, "calls": calls, "policy": {}}
    for change in (
        {"staleness": 0},
        {"policy": {"secret": ""}},
        {"policy": {"lease_s": 0}},
        {"policy": {"port": 65_535}},
        {"policy": {"longest_hold": 0}},
        {"calls": [*calls, Call(name="else", on="sampler", function=print, stage="train")]},
    ):
        options = given | change
        try:
            served = WorkerPolicy(**policy | options.pop("policy"))
            WorkerFlow({"actor": mesh, "sampler": mesh}, options.pop("calls"), served, **options)
        except PlanError as error:
            found.append(str(error))
    return found


def test_a_flow_that_cannot_be_is_refused() -> None:
    (found,) = pool(1).run(refusals)
    matches = (
        "Use at least 1",
        "by a secret, which is empty",
        "lease_s=0",
        "65535",
        "longest_hold=0",
        "calls are on actor, sampler",
    )
    assert len(found) == len(matches)
    for text, match in zip(found, matches, strict=True):
        assert match in text and "\n" not in text, text
