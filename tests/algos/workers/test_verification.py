"""What a worker brings is learnt when a validator has found that the weights it names wrote it, and who lies gets no work."""

from __future__ import annotations

import base64
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

import meshkit as mk
from meshkit.algos.dataflow import PROMPTED, Call, Sample
from meshkit.algos.rollout import BOUNDS_16_BITS, Rollout, Verdict, fingerprint_bytes, most_fingerprint_bytes
from meshkit.algos.shardcast import Origin, fetch
from meshkit.algos.workers import (
    GIVES,
    RolloutServer,
    VerifyPolicy,
    WorkerPolicy,
    validate,
    work,
)
from meshkit.algos.workers._rollouts import answer_of, claim_of, rollout_of_claim
from meshkit.algos.workers._validator import why_not
from meshkit.algos.workers.command import build_published
from meshkit.errors import CheckpointError, PlanError, StepError
from meshkit.models import LLAMA_PLAN, Llama, load_pretrained
from meshkit.recipes import rollout_flow
from meshkit.recipes.flags import SampledFlags
from tests.algos.workers.test_workers import (
    CONFIG,
    GOOD,
    GROWTH,
    LONG,
    SAMPLES,
    SAMPLING,
    SECRET,
    STEPS,
    TOKENIZER,
    TOL_FP32,
    asked,
    differences,
    flow_on,
    sent,
    served,
    source,
)
from tests.world import pool

TRUSTED = "of validators"
FEATURES = CONFIG.hidden_size
VERIFY = VerifyPolicy(
    secret=TRUSTED, fingerprint_bytes=SAMPLES * most_fingerprint_bytes(SAMPLING.max_new_tokens, STEPS)
)

# ------------------------------------------------------------------------------------------------------ with models


def scaled(model: torch.nn.Module, folder: Path) -> None:
    load_pretrained(model, folder)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.01)


def rounded(model: torch.nn.Module, folder: Path) -> None:
    """To int8, by rows."""
    load_pretrained(model, folder)
    with torch.no_grad():
        for param in model.parameters():
            step = param.abs().amax(-1, keepdim=True) / 127
            param.copy_((param / step).round() * step)


def learnt_of(cheat: str | None, validator: str, folder: str, shade: float = 0.0) -> Any:
    """Of rank 0, which trains: what each step learnt, and warnings. Rank 1 is an honest worker, 2 and perhaps 3 a validator,
    the last a worker that cheats: of these, groups that were taken, or passed, or the error.

    shade: what the honest worker takes off each log-probability that it says, where bounds are those of bf16.
    """
    ranks = {"actor": range(1), "worker": range(1, 2), "validator": range(2, 4 if validator else 3)}
    meshes = {name: mk.init_mesh(validator if name == "validator" else "", ranks=of) for name, of in ranks.items()}
    last = mk.init_mesh("", ranks=range(3, 4)) if cheat else None
    run, learnt = None, list[list[dict[str, Any]]]()
    if meshes["actor"].here:
        run = mk.parallelize(Llama(CONFIG), meshes["actor"], plan=LLAMA_PLAN)
        mk.init_weights(run.model, seed=0, plan=run.plan)

    def learn(samples: list[Sample]) -> None:
        assert run is not None
        learnt.append([{name: sample[name] for name in ("key", *GIVES)} for sample in samples])
        with torch.no_grad():
            for param in run.model.parameters():
                param.mul_(GROWTH)

    call = Call(name="learn", on="actor", function=learn, needs=(*PROMPTED, *GIVES), stage="train")
    verify = replace(VERIFY, bounds=BOUNDS_16_BITS if shade else None)
    flow = flow_on(meshes["actor"], [call], run, Path(folder) / "published", verify=verify)
    port = [flow.port]
    dist.broadcast_object_list(port, src=0)
    if meshes["actor"].here:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(STEPS):
                flow.step()
        return learnt, [str(each.message) for each in said]
    address, at = f"http://127.0.0.1:{port[0]}", Path(folder) / str(dist.get_rank())
    options: dict[str, Any] = {"timeout_s": 60, "report": lambda line: None}
    if meshes["validator"].here:
        mesh = meshes["validator"]
        at = Path(folder) / "validator"
        return validate(mesh, address, at, secret=TRUSTED, build=partial(build_published, mesh), groups=3, **options)
    mesh = last if last is not None and last.here else meshes["worker"]
    load = {"scaled": scaled, "rounded": rounded}[cheat] if cheat and mesh is last else load_pretrained
    ended = Path(folder) / "ended"
    while cheat and mesh is not last and not ended.exists():
        time.sleep(0.02)  # or the honest one may have written all before the other has joined

    def build(path: Path, told: Any) -> mk.Run:
        run = build_published(mesh, path, told)
        # Slow enough for new weights to arrive within an answer.
        run.model.register_forward_pre_hook(lambda module, args: time.sleep(0.0 if cheat else 0.2))
        return run

    def answer(sample: Sample) -> dict[str, Any]:
        return answer_of({**sample, "log_probs": sample["log_probs"] - shade})

    with (
        patch("meshkit.algos.workers._worker.load_pretrained", load),
        patch("meshkit.algos.workers._worker.answer_of", answer),
    ):
        try:
            return work(mesh, address, at, secret=SECRET, build=build, tokens=1, sequences=3 * SAMPLES, **options)
        except StepError as error:
            ended.touch()
            return str(error)


@pytest.mark.parametrize("validator", ["tp=2", "dp_shard=2"])
def test_what_an_honest_worker_writes_passes_with_tokens_of_all_versions(validator: str, tmp_path: Path) -> None:
    (steps, said), taken, passed, _ = pool(4).run(learnt_of, None, validator, str(tmp_path))
    rows = [row for step in steps for row in step]
    assert len(rows) == taken * SAMPLES == passed * SAMPLES and said == []
    assert any(len(set(row["versions"].tolist())) > 1 for row in rows)  # of one answer


def test_the_log_probs_that_are_learnt_are_the_validators_and_not_what_a_worker_says(tmp_path: Path) -> None:
    """It says each a little less, within bounds."""
    (steps, said), taken, passed, _ = pool(4).run(learnt_of, None, "dp_shard=2", str(tmp_path), 0.03)
    assert taken == passed and said == []
    (worst,) = pool(1).run(differences, steps)
    assert max(worst) <= TOL_FP32


@pytest.mark.parametrize("cheat", ["scaled", "rounded"])
def test_only_an_honest_workers_rollouts_are_learnt_and_the_cheat_is_named(cheat: str, tmp_path: Path) -> None:
    (steps, said), taken, passed, error = pool(4).run(learnt_of, cheat, "", str(tmp_path))
    rows = [row for step in steps for row in step]
    groups = sum(len(source(step)) for step in range(STEPS))
    assert len(rows) == groups * SAMPLES and taken == passed == groups
    (worst,) = pool(1).run(differences, steps)
    assert max(worst) <= TOL_FP32
    assert "the trainer refuses: /" in error and "validators did not pass 2 groups of this worker" in error, error
    refused = [each for each in said if "does not" not in each and "at most" in each]
    assert len(refused) == 2 and len({each.split(": group")[0] for each in refused}) == 1, said
    assert refused[1].endswith("It gets no more work. Another one writes them.")


# ------------------------------------------------------------------------------------------------------ messages


def signed(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """With a fingerprint of the right size, of nothing."""
    size = fingerprint_bytes(np.array(answer["versions"]), FEATURES)
    return {**answer, "fingerprint": base64.b64encode(bytes(size)).decode(), **changes}


def bring(server: RolloutServer, node: str, group: int) -> tuple[int, Any]:
    return asked(server, "/rollouts", {"node": node, "group": group, "answers": [signed(GOOD), signed(LONG)]})


def begin(server: RolloutServer, node: str, room: int) -> list[int]:
    status, given = asked(server, "/work", {"node": node, "version": 1, "room": room, "holds": []})
    assert status == 200, given
    return [each["group"] for each in given["groups"]]


def verify(server: RolloutServer, room: int = 9, **changes: Any) -> Any:
    status, given = asked(server, "/verify", {"node": "v", "holds": [], "room": room, **changes}, secret=TRUSTED)
    assert status == 200, given
    return given


def judge(
    server: RolloutServer, *verdicts: tuple[Any, str], lengths: tuple[int, ...] = (3, 7), **changes: Any
) -> tuple[int, Any]:
    """lengths: of the answers of a group that passes."""
    found = [[-0.25] * length for length in lengths]
    said = [{"ticket": ticket, "why": why, "log_probs": [] if why else found} for ticket, why in verdicts]
    return asked(server, "/verdict", {"node": "v", "verdicts": said, **changes}, secret=TRUSTED)


def test_a_group_has_arrived_when_a_validator_has_passed_it_and_a_failed_one_is_free_again() -> None:
    server = served(VERIFY)
    try:
        server.weights = {1: "sha256:1", 2: "sha256:2"}
        assert begin(server, "a", 3) == [0, 1, 2]
        assert all(bring(server, "a", group) == (200, {"taken": True}) for group in (0, 1, 2))
        assert server.arrived() == [] and server.waiting == 3
        assert bring(server, "b", 0) == (200, {"taken": False})  # somebody has brought it
        given = verify(server, room=2)
        assert [each["ticket"] for each in given["groups"]] == [0, 1] and not given["done"]
        assert given["weights"] == {"1": "sha256:1", "2": "sha256:2"}
        prompt = [TOKENIZER.bos_id, *TOKENIZER.encode("1+2=")]
        assert given["groups"][0]["answers"] == [{"prompt_ids": prompt, **signed(each)} for each in (GOOD, LONG)]
        assert judge(server, (0, ""), (1, "answer 0: mantissa: 3 is not 0"))[0] == 200
        ((group, samples),) = server.arrived()
        assert group == 0 and len(samples) == 2 and "fingerprint" not in samples[0] and server.waiting == 1
        assert [each["log_probs"].tolist() for each in samples] == [[-0.25] * 3, [-0.25] * 7]  # the validator's
        assert server.refusals() == ["a: group 1: answer 0: mantissa: 3 is not 0."]
        assert begin(server, "b", 1) == [1]  # one failure ends no worker, and another gets the group first
        assert bring(server, "a", 1) == (200, {"taken": True})
        assert [each["ticket"] for each in verify(server, holds=[])["groups"]] == [3, 2]  # the first groups first
        judge(server, (1, ""))  # late, and of the copy that failed
        assert server.arrived() == [] and server.waiting == 2
        judge(server, (3, "x" * 400))
        assert server.arrived() == [] and server.waiting == 0  # the other one of the worker does not count any more
        (refusal,) = server.refusals()
        assert refusal == f"a: group 1: {'x' * 300}. It gets no more work."
        for path, message in (
            ("/work", {"node": "a", "version": 1, "room": 2, "holds": []}),
            ("/rollouts", {"node": "a", "group": 1, "answers": [signed(GOOD), signed(LONG)]}),
        ):
            status, text = asked(server, path, message)
            assert status == 400 and "validators did not pass 2 groups of this worker, so it gets no more" in text, text
            assert "The last one, group 1: xx" in text and "\n" not in text
        assert begin(server, "b", 9)[:2] == [1, 2]
        assert server.workers() == ["b"] and server.validators() == ["v"]
        server.finish(timeout_s=0.0)
        begin(server, "b", 1)
        began = time.monotonic()
        server.finish(timeout_s=0.3)  # the validator has not asked since
        assert time.monotonic() - began >= 0.3
        assert verify(server)["done"] and verify(server)["groups"] == []
        server.finish(timeout_s=60.0)
        assert time.monotonic() - began < 30.0
    finally:
        server.close()


def test_who_knows_the_workers_secret_is_no_validator_nor_the_other_way_round() -> None:
    server, plain = served(VERIFY), served()
    try:
        begin(server, "a", 1)
        bring(server, "a", 0)
        said: dict[str, dict[str, Any]] = {
            "/validator/join": {},
            "/verify": {"node": "a", "holds": [], "room": 9},
            "/verdict": {"node": "a", "verdicts": [{"ticket": 0, "why": ""}]},
            "/validator/leave": {"node": "a"},
        }
        for path, message in said.items():
            status, text = asked(server, path, message)
            assert status == 403 and "not signed by the secret that the trainer has for validators" in text, path
            body = json.dumps({"life": server.life, **message}).encode()
            assert sent(server, path, body, secret="")[0] == sent(server, path, body, secret="else")[0] == 403
            # Nobody verifies where none is asked to.
            status, text = asked(plain, path, message)
            assert status == 400 and f"there is no '{path}'" in text, (path, text)
        assert server.waiting == 1 and server.arrived() == [] and server.validators() == []
        for path in ("/join", "/work", "/rollouts", "/leave"):
            status, text = asked(server, path, {"node": "a"}, secret=TRUSTED)
            assert status == 403 and text == "the message is not signed by the secret that the trainer has"
        assert judge(server, (0, ""), life="before") == (200, {"rejoin": True}) and server.waiting == 1
        status, told = asked(server, "/validator/join", {}, secret=TRUSTED)
        assert status == 200 and told == {"seed": 1, "life": server.life, "bounds": None}
    finally:
        server.close()
        plain.close()


def test_odd_words_of_a_validator_are_refused_and_decide_nothing() -> None:
    server = served(VERIFY)
    try:
        begin(server, "a", 1)
        bring(server, "a", 0)
        for path, message, match in (
            ("/verify", {"node": "v", "holds": 3, "room": 1}, "not iterable"),
            ("/verify", {"node": "v", "holds": [], "room": "x"}, "'x' is no whole number"),
            ("/verify", {"holds": [], "room": 1}, "there is no 'node'"),
            ("/verdict", {"node": "v"}, "there is no 'verdicts'"),
            ("/verdict", {"node": "v", "verdicts": [{"ticket": 0}]}, "there is no 'why'"),
            ("/verdict", {"node": "v", "verdicts": [{"ticket": "x", "why": ""}]}, "'x' is no whole number"),
            ("/verdict", {"node": "v", "verdicts": [{"ticket": 0, "why": ""}]}, "there is no 'log_probs'"),
            (
                "/verdict",
                {"node": "v", "verdicts": [{"ticket": 0, "why": "", "log_probs": [[-1.0] * 3]}]},
                "are not one number for each token of its answers",
            ),
            (
                "/verdict",
                {"node": "v", "verdicts": [{"ticket": 0, "why": "", "log_probs": [[-1.0] * 3, [float("nan")] * 7]}]},
                "are not finite",
            ),
            ("/validator/leave", {}, "there is no 'node'"),
        ):
            status, text = asked(server, path, message, secret=TRUSTED)
            assert status == 400 and match in text, (path, message, text)
        assert judge(server, (7, ""), (-1, "wrong"))[0] == 200
        assert server.waiting == 1 and server.arrived() == [] and server.refusals() == []
        assert verify(server, room=-3)["groups"] == []
    finally:
        server.close()


ODD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "none": (lambda answer: {**answer, "fingerprint": None}, "has no fingerprint, and the trainer verifies rollouts"),
    "no text": (lambda answer: {**answer, "fingerprint": [1, 2]}, "has no fingerprint"),
    "no base64": (lambda answer: {**answer, "fingerprint": "?" * 8}, "a fingerprint that is no base64"),
    "other letters": (lambda answer: {**answer, "fingerprint": "\u00e4" * 8}, "a fingerprint that is no base64"),
    "too short": (lambda answer: {**answer, "fingerprint": "AAAA"}, "of 3 bytes, and its 3 tokens have 480"),
    "too long": (
        lambda answer: {**answer, "fingerprint": answer["fingerprint"] + "AAAA"},
        "of 483 bytes, and its 3 tokens have 480",
    ),
}


def test_answers_without_a_fingerprint_of_their_size_are_refused() -> None:
    server = served(VERIFY)
    good = {"node": "a", "group": 0, "answers": [signed(GOOD), signed(LONG)]}
    try:
        for what, (change, match) in ODD.items():
            begin(server, "a", 1)
            odd = change({**signed(GOOD), "fingerprint": base64.b64encode(bytes(480)).decode().rstrip("=")})
            if what == "too long":
                odd = {**signed(GOOD), "fingerprint": base64.b64encode(bytes(483)).decode()}
            status, text = asked(server, "/rollouts", {**good, "answers": [odd, signed(LONG)]})
            assert status == 400 and match in text and "answer 0" in text, (what, text)
        status, text = asked(server, "/rollouts", {**good, "answers": [GOOD, LONG]})
        assert status == 400 and "answer 0 has no fingerprint" in text
        assert server.waiting == 0
    finally:
        server.close()


def test_the_largest_message_of_an_honest_worker_is_not_too_large() -> None:
    """Of answers as long as can be, with weights that change as often as they can."""
    server, plain = served(VERIFY), served()
    try:
        longest = {**LONG, "versions": [1, 1, 1, 1, 2, 2, 2], "log_probs": [-1.2345678901234567e-05] * 7}
        size = len(json.dumps({"node": "n" * 80, "group": 10**6, "answers": [signed(longest)] * SAMPLES}))
        assert size <= server.most_bytes
        assert server.most_bytes - plain.most_bytes == VERIFY.fingerprint_bytes * 4 // 3
    finally:
        server.close()
        plain.close()


@pytest.mark.parametrize("features", [3, 16, 64, 200])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_no_fingerprint_is_larger_than_the_most(features: int, tokens: int) -> None:
    draw = np.random.default_rng(0)
    for versions in (1, 2, 5):
        for _ in range(20):
            of_tokens = np.sort(draw.integers(0, versions, tokens))
            assert fingerprint_bytes(of_tokens, features) <= most_fingerprint_bytes(tokens, versions)
    whole = np.zeros(96, np.int64)
    assert fingerprint_bytes(whole, 128) == most_fingerprint_bytes(96, 1) == 3 * 640


# ------------------------------------------------------------------------------------------------------ verdicts


def test_a_rollout_passes_if_each_token_was_checked_and_no_check_fails() -> None:
    rollout = Rollout(ids=np.array([1, 2, 3]), versions=np.array([4, 4, 5]))
    of_4, of_5 = np.array([True, True, False]), np.array([False, False, True])
    other = Verdict(failed="version", why="it claims versions [5]", checked=of_4)
    assert why_not([other, Verdict(failed="version", why="[4]", checked=of_5)], rollout) == ""
    assert why_not([Verdict(checked=np.ones(3, bool))], replace(rollout, versions=np.full(3, 4))) == ""
    assert why_not([other], rollout) == "version: 1 of its tokens were held against no weights"
    assert why_not([], rollout) == "version: 3 of its tokens were held against no weights"
    wrong = Verdict(failed="mantissa", why="mantissa_mean is 3", checked=of_5)
    assert why_not([other, wrong], rollout) == "mantissa: mantissa_mean is 3"
    unread = Verdict(failed="format", why="it has no log_probs", checked=np.zeros(0, bool))
    assert why_not([unread], rollout) == "format: it has no log_probs"


def test_a_claim_says_what_the_worker_said() -> None:
    row = {"prompt_ids": np.array([7, 8]), "ids": np.array([1, 2]), "log_probs": np.array([-0.1, -1 / 3])}
    row |= {"versions": np.array([3, 4]), "fingerprint": np.arange(10, dtype=np.uint8)}
    rollout = rollout_of_claim(json.loads(json.dumps(claim_of(row))))
    for name, value in row.items():
        assert np.array_equal(getattr(rollout, name), value), name


# ------------------------------------------------------------------------------------------------------ the trainer


def without_validator(folder: str) -> tuple[list[str], str]:
    """Warnings, and the error, of a trainer whose groups nobody verifies."""
    mesh = mk.init_mesh()
    calls = [Call(name="learn", on="actor", function=lambda samples: None, needs=PROMPTED, stage="train")]
    flow = flow_on(mesh, calls, None, Path(folder), verify=VERIFY, timeout=timedelta(seconds=2))
    server = flow._server
    assert server is not None
    server.newest = 0
    for group in begin_and_bring(server):
        assert group < 3
    with warnings.catch_warnings(record=True) as said, patch("meshkit.algos.workers._flow.UNHEARD_S", 0.3):
        warnings.simplefilter("always")
        with pytest.raises(StepError) as error:
            flow.step()
    flow.close()
    return [str(each.message) for each in said], str(error.value)


def begin_and_bring(server: RolloutServer) -> list[int]:
    """A worker has the weights of version 0, and brings the first three groups."""
    _, given = asked(server, "/work", {"node": "a", "version": 0, "room": 3, "holds": []})
    groups = [each["group"] for each in given["groups"]]
    for group in groups:
        answers = [signed({**GOOD, "versions": [0] * 3})] * 2
        assert asked(server, "/rollouts", {"node": "a", "group": group, "answers": answers})[0] == 200
    return groups


def test_a_trainer_without_a_validator_says_what_to_start(tmp_path: Path) -> None:
    ((said, error),) = pool(1).run(without_validator, str(tmp_path / "published"))
    (warning,) = said
    for text in (warning, error):
        assert "3 groups of rollouts wait for a validator, and there is none. Start one: python -m meshkit" in text
        assert "rollout-validator http://127.0.0.1:" in text and "\n" not in text
    assert "iteration 0: 0 groups of rollouts are ready after 2 s, and the next ones are not." in error


def resumed(verified: bool, folder: str) -> tuple[list[int], list[int], list[int], set[int]]:
    """(groups that a flow saves as ready, those that the next one has ready, those that it gives out, versions kept)."""
    mesh = mk.init_mesh()
    calls = [Call(name="learn", on="actor", function=lambda samples: None, needs=PROMPTED, stage="train")]
    flow = flow_on(mesh, calls, None, Path(folder), verify=VERIFY if verified else None, staleness=4)
    server = flow._server
    assert server is not None
    server.newest = 0
    begin_and_bring(server)
    more = begin_and_bring(server)
    if verified:
        judge(server, *((ticket, "") for ticket in range(4)), lengths=(3, 3))
    flow.step()
    kept = set(server.weights)
    state = flow.state_dict()
    flow.close()
    assert more == [3, 4, 5]
    again = flow_on(mesh, calls, None, Path(folder), verify=VERIFY, staleness=4)
    again.load_state_dict(state)
    other = again._server
    assert other is not None
    other.newest = 1
    _, given = asked(other, "/work", {"node": "a", "version": 1, "room": 3, "holds": []})
    again.close()
    return sorted(state["ready"]), sorted(again._buffer.ready), [each["group"] for each in given["groups"]], kept


@pytest.mark.parametrize("verified", [True, False])
def test_what_was_not_passed_is_written_anew_after_a_restart(verified: bool, tmp_path: Path) -> None:
    ((saved, ready, given, _),) = pool(1).run(resumed, verified, str(tmp_path / "published"))
    if verified:
        assert saved == ready == [3] and given == [4, 5, 6]
    else:  # nobody had verified what was ready
        assert saved == [3, 4, 5] and ready == [] and given == [3, 4, 5]


def kept_versions(staleness: int, folder: str) -> list[tuple[list[int], list[int]]]:
    """(versions that the server names, folders) after each publication."""
    mesh, found = mk.init_mesh(), []
    calls = [Call(name="learn", on="actor", function=lambda samples: None, needs=PROMPTED, stage="train")]
    flow = flow_on(mesh, calls, None, Path(folder), verify=VERIFY, staleness=staleness, source=lambda step: [], total=8)
    server = flow._server
    assert server is not None
    for _ in range(7):
        flow.step()
        found.append((sorted(server.weights), sorted(int(each.name) for each in Path(folder).iterdir())))
        assert server.unverified is not None
    flow.close()
    return found


@pytest.mark.parametrize(("staleness", "kept"), [(1, 3), (2, 3), (4, 5)])
def test_weights_of_all_tokens_that_may_wait_are_kept(staleness: int, kept: int, tmp_path: Path) -> None:
    (found,) = pool(1).run(kept_versions, staleness, str(tmp_path / "published"))
    for number, (named, folders) in enumerate(found, 1):
        assert named == folders == list(range(max(0, number + 1 - kept), number + 1))


def test_workers_and_validators_do_not_share_a_secret() -> None:
    given: dict[str, Any] = {"port": 0, "folder": Path("never"), "settings": {}, "gives": GIVES, "tokens": 9}
    with pytest.raises(PlanError, match="the validators' secret is that of the workers, any of whom could then pass"):
        WorkerPolicy(secret=TRUSTED, verify=VERIFY, **given)


# ------------------------------------------------------------------------------------------------------ weights


def test_a_version_that_is_not_the_newest_comes_and_only_the_origins(tmp_path: Path) -> None:
    for name, text in (("right", "of the trainer"), ("wrong", "of a worker")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(text)
    quick: dict[str, Any] = {"timeout_s": 1.0}
    with (
        Origin(host="127.0.0.1", secret=SECRET, keep=3) as origin,
        Origin(host="127.0.0.1", secret=SECRET, keep=3) as liar,  # a worker knows the secret that signs manifests
    ):
        digests = [origin.publish(tmp_path / "right", version).digest for version in range(3)]
        for version in range(3):
            liar.publish(tmp_path / "wrong", version)
        at, lies = f"http://127.0.0.1:{origin.port}", f"http://127.0.0.1:{liar.port}"
        for version in (1, 0, 2):
            folder = fetch([lies, at], tmp_path / "got", version, digest=digests[version], **quick)
            assert folder.name == f"version-{version}" and (folder / "weights").read_text() == "of the trainer"
        with pytest.raises(CheckpointError, match="gives a version 1 that is not the origin's"):
            fetch([lies], tmp_path / "else", 1, digest=digests[1], **quick)
        with pytest.raises(CheckpointError, match="version 7 did not come: nobody has version 7"):
            fetch([at], tmp_path / "got", 7, digest="sha256:7", **quick)
    # What is there needs nobody, if it is what was meant.
    assert fetch([at], tmp_path / "got", 0, digest=digests[0], **quick).name == "version-0"
    with pytest.raises(CheckpointError):
        fetch([at], tmp_path / "got", 0, digest=digests[1], **quick)


# ------------------------------------------------------------------------------------------------------ refused


def refused_model(folder: str) -> str:
    """What a recipe's flow says of a model that keeps a cache of its own."""
    mesh, shape = mk.init_mesh(), transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=32, vocab_size=40)
    for name in ("secret", "validators"):
        (Path(folder) / name).write_text(name)
    config = SampledFlags(
        out=Path(folder),
        staleness=1,
        worker_port=0,
        worker_secret=Path(folder) / "secret",
        worker_verify=True,
        validator_secret=Path(folder) / "validators",
    )
    run = mk.parallelize(transformers.GPT2LMHeadModel(shape), mesh)
    prompts: Any = None  # it is refused before it reads any
    try:
        rollout_flow(config, {"actor": mesh}, run, TOKENIZER, SAMPLING, prompts, [], [], engine=None)
    except PlanError as error:
        return str(error)
    return ""


def test_a_model_that_gives_no_fingerprints_is_refused_by_the_trainer(tmp_path: Path) -> None:
    (error,) = pool(1).run(refused_model, str(tmp_path))
    assert error.startswith("--worker-verify: GPT2LMHeadModel does not attend by a `mask`, and no fingerprints"), error
    assert "Leave --worker-verify and --validator-secret out." in error and "\n" not in error
