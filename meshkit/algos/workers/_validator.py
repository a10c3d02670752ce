"""A validator of rollouts (TOPLOC, verifiable inference): have the weights that workers name written what they brought?

It is a job of its own, which is trusted: it gets each version of the weights that a token names, and verifies by forwards.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshkit.algos.rollout import FingerprintBounds, Rollout, Verdict, verify_rollouts
from meshkit.algos.shardcast import fetch
from meshkit.algos.workers._rollouts import rollout_of_claim
from meshkit.algos.workers._wire import Link, Rejoin, Unreachable, node_name
from meshkit.errors import CheckpointError, StepError
from meshkit.mesh import Mesh
from meshkit.models import load_pretrained
from meshkit.step import Run

IDLE_S = 0.2  # between two questions of a validator that has nothing to verify


@dataclass
class _Plan:
    """What the first rank learned, for all: claims of each group by ticket, whether the run is over, or begins anew."""

    groups: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    done: bool = False
    rejoin: bool = False


@dataclass(frozen=True)
class _Found:
    """Of a group: why it does not pass, or "", and of each answer the log-probabilities [N] by the weights of its tokens."""

    why: str
    log_probs: list[np.ndarray]


class _Desk:
    """The first rank's side: talks with the trainer, and gets the versions of the weights that groups name."""

    def __init__(
        self, address: str, folder: Path, *, secret: str, upstreams: tuple[str, ...], timeout_s: float
    ) -> None:
        self._link = Link(address, secret=secret, role="rollout validator", patience_s=timeout_s)
        self.node, self._holds = node_name(os.getpid()), list[int]()
        self.settings = self._link.ask_patiently("/validator/join", {})
        self._said = {"node": self.node, "life": str(self.settings["life"])}
        self._upstreams = [*upstreams, f"http://{self._link.host}:{int(self.settings['weights_port'])}"]
        self._folder = folder / self._said["life"]  # versions of another life are others
        self._digests: dict[int, str] = {}

    def ask(self, room: int) -> _Plan:
        answer = self._link.ask_patiently("/verify", {**self._said, "holds": [], "room": room})
        groups = {int(each["ticket"]): each["answers"] for each in answer["groups"]}
        self._holds = list(groups)
        self._note_weights(answer["weights"])
        return _Plan(groups, bool(answer["done"]))

    def weights(self, version: int) -> tuple[Path | None, str]:
        """(their folder, why there is none). Says first that the groups are still being verified."""
        with suppress(Unreachable, StepError):
            self._note_weights(self._link.ask("/verify", {**self._said, "holds": self._holds, "room": 0})["weights"])
        if version not in self._digests:
            return None, "the trainer does not have them out"
        try:
            return fetch(self._upstreams, self._folder, version, digest=self._digests[version]), ""
        except CheckpointError as error:
            return None, str(error)

    def tell(self, found: Mapping[int, _Found]) -> None:
        """One message for each group, which is as long as that of the worker that brought it, less its fingerprints."""
        with suppress(Rejoin):  # the next question is answered so again
            for ticket, each in found.items():
                log_probs = [] if each.why else [of_answer.tolist() for of_answer in each.log_probs]
                verdict = {"ticket": ticket, "why": each.why, "log_probs": log_probs}
                self._link.ask_patiently("/verdict", {**self._said, "verdicts": [verdict]})

    def close(self) -> None:
        with suppress(Unreachable, StepError):
            self._link.ask("/validator/leave", self._said)
        self._link.close()

    def _note_weights(self, digests: Mapping[str, str]) -> None:
        self._digests = {int(version): str(digest) for version, digest in digests.items()}
        for path in self._folder.glob("version-*"):
            number = path.name.split("-")[1].split(".")[0]
            if path.is_dir() and int(number) < min(self._digests, default=0):
                path.with_suffix(".json").unlink(missing_ok=True)
                shutil.rmtree(path)


def validate(
    mesh: Mesh,
    address: str,
    folder: str | os.PathLike[str],
    *,
    secret: str,
    build: Callable[[Path, Mapping[str, Any]], Run],
    upstreams: tuple[str, ...] = (),
    tokens_per_microbatch: int = 16_384,
    groups: int = 16,
    timeout_s: float = 600.0,
    report: Callable[[str], object] = print,
) -> int:
    """Verify what workers bring to the trainer at `address` until its run is over.

    Returns how many groups passed, on the first rank. Every rank of the mesh, which is all of this job, calls it.
    folder, build, upstreams, timeout_s, report: as of `work`. secret: of validators. groups: verified at the same time: of
    those, tokens of one version share forwards. tokens_per_microbatch: more, where a rollout is longer.
    A group passes if all tokens of all its answers were held against the weights of their versions, and pass. The trainer
    learns it with the log-probabilities that were computed here.
    Wire: of the first rank, HTTP with the trainer; between ranks that of `verify_rollouts`, and the groups.
    Raises: StepError for a trainer that does not answer, and one that does not know the secret.
    """
    passed, over = 0, False
    while not over:
        with ExitStack() as stack:
            desk = None
            if mesh.rank == 0:
                desk = _Desk(address, Path(folder), secret=secret, upstreams=upstreams, timeout_s=timeout_s)
                stack.callback(desk.close)
                report(f"{desk.node} verifies")
            settings = mesh.host.broadcast(None if desk is None else desk.settings)
            assert settings is not None
            checker = _Checker(mesh, build, settings, tokens_per_microbatch)
            of_life, over = _validate(mesh, desk, checker, groups, report)
            passed += of_life
            if desk is not None:
                why = "the run is over" if over else "the trainer has started anew"
                report(f"{desk.node}: {why}; {passed} groups passed")
    return passed


def _validate(
    mesh: Mesh, desk: _Desk | None, checker: _Checker, room: int, report: Callable[[str], object]
) -> tuple[int, bool]:
    """(how many groups passed, whether the run is over); not if the trainer has started anew."""
    passed = 0
    while True:
        plan = None
        if desk is not None:
            try:
                plan = desk.ask(room)
            except Rejoin:
                plan = _Plan(rejoin=True)
        plan = mesh.host.broadcast(plan)
        assert plan is not None
        if plan.done or plan.rejoin:
            return passed, plan.done
        found = checker.look(plan.groups, desk, report) if plan.groups else None
        if found is None:
            time.sleep(IDLE_S)
        elif desk is not None:
            desk.tell(found)
            passed += sum(not each.why for each in found.values())
            for ticket, each in found.items():
                if each.why:
                    report(f"{desk.node}: copy {ticket} of a group does not pass: {each.why}")


class _Checker:
    """The model on the mesh, with weights of one version after the other."""

    def __init__(
        self,
        mesh: Mesh,
        build: Callable[[Path, Mapping[str, Any]], Run],
        settings: Mapping[str, Any],
        tokens_per_microbatch: int,
    ) -> None:
        self._mesh, self._build, self._settings = mesh, build, settings
        self._tokens, self._version = tokens_per_microbatch, -1
        self._run: Run | None = None
        self._temperature = settings["sampling"]["temperature"] or 1.0  # as log-probabilities of greedy answers are
        given = settings["bounds"]
        self._bounds = None if given is None else FingerprintBounds(**given)

    def look(
        self, groups: Mapping[int, Sequence[Mapping[str, Any]]], desk: _Desk | None, report: Callable[[str], object]
    ) -> dict[int, _Found] | None:
        """What holds of each group, by ticket, on the first rank. None where weights cannot be had now."""
        mesh = self._mesh
        answers = [(ticket, number, claim) for ticket, claims in groups.items() for number, claim in enumerate(claims)]
        rollouts = [rollout_of_claim(claim) for _, _, claim in answers]
        mine = range(mesh.data_rank, len(rollouts), mesh.data_ranks)
        verdicts: dict[int, list[Verdict]] = {index: [] for index in mine}
        longest = max(len(each.tokens) for each in rollouts)
        versions = [set(claim["versions"]) for _, _, claim in answers]
        for version in sorted(set[int]().union(*versions)):
            if not self._take_weights(version, desk, report):
                return None
            assert self._run is not None
            of_version = [index for index in mine if version in versions[index]]
            found = verify_rollouts(
                self._run,
                [rollouts[index] for index in of_version],
                tokens_per_microbatch=max(self._tokens, longest),
                version=version,
                temperature=self._temperature,
                bounds=self._bounds,
            )
            for index, verdict in zip(of_version, found, strict=True):
                verdicts[index].append(verdict)
        of_mine = {index: (why_not(verdicts[index], rollouts[index]), log_probs_of(verdicts[index])) for index in mine}
        told = mesh.host.gather(of_mine)
        by_answer = {index: each for of_rank in told or () for index, each in of_rank.items()}
        of_groups = {ticket: _Found("", []) for ticket in groups}
        for index, (ticket, number, _) in enumerate(answers if told else ()):
            why, log_probs = by_answer[index]
            before = of_groups[ticket]
            said = f"answer {number}: {why}" if why and not before.why else before.why
            of_groups[ticket] = _Found(said, [*before.log_probs, log_probs])
        return of_groups

    def _take_weights(self, version: int, desk: _Desk | None, report: Callable[[str], object]) -> bool:
        """On every rank. Whether they are there."""
        found = None
        if desk is not None:
            found, why = desk.weights(version)
            if found is None:
                report(f"{desk.node}: no weights of version {version} now: {why}")
        folder = self._mesh.host.broadcast(found)
        if folder is None:
            return False
        if self._run is None:
            self._run = self._build(folder, self._settings)
        if version != self._version:
            load_pretrained(self._run.model, folder)
            self._version = version
        return True


def why_not(verdicts: Sequence[Verdict], rollout: Rollout) -> str:
    """Why a rollout does not pass, "" if it does. verdicts: by the weights of each version that its tokens name."""
    # A token of another version than that of the weights at hand is no fault: it is checked by those of its own.
    for verdict in verdicts:
        if verdict.failed not in ("", "version"):
            return f"{verdict.failed}: {verdict.why}"
    checked = np.zeros(len(rollout.ids), bool)
    for verdict in verdicts:
        checked |= verdict.checked
    return "" if checked.all() else f"version: {int((~checked).sum())} of its tokens were held against no weights"


def log_probs_of(verdicts: Sequence[Verdict]) -> np.ndarray:
    """[N] of a rollout that passes, each token's by the weights of its version."""
    found: np.ndarray = np.sum([verdict.log_probs for verdict in verdicts if len(verdict.log_probs)], axis=0)
    return found
