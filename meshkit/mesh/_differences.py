"""What ranks that do not agree have said, compared over the store, and the sentence about it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Literal

from torch import Tensor

from meshkit.mesh.ranges import ranges_in_words

Scope = Literal["mesh", "stage", "rows"]
SHOWN = 4  # further facts that differ, by name alone; and values of one fact

_REMEDY: dict[Scope, str] = {
    "mesh": "Every rank of the mesh needs the same.",
    "stage": "The ranks of a pipeline stage need the same.",
    "rows": "Ranks that differ only in pp, cp or tp read the same rows: load them by mesh.data_rank of mesh.data_ranks.",
}


@dataclass(frozen=True)
class Fact:
    """digest: of the values of a tensor on a device, which `text` says nothing of."""

    text: str
    digest: Tensor | None = None

    def in_text(self) -> str:
        return self.text if self.digest is None else f"{self.text} {int(self.digest) % (1 << 64):016x}"


@dataclass(frozen=True)
class Call:
    """at: the line of the user's code that made it."""

    what: str
    at: str
    facts: Mapping[Scope, Mapping[str, Fact]]

    def in_text(self) -> dict[str, Any]:
        facts = {
            scope: {name: fact.in_text() for name, fact in each.items()} for scope, each in self.facts.items() if each
        }
        return {"what": self.what, "at": self.at, "facts": facts}


@dataclass(frozen=True, kw_only=True)
class Told:
    """Of one rank. calls: since all agreed last, as `Call.in_text` has them."""

    rank: int
    host: str
    calls: Sequence[Mapping[str, Any]]


def difference(
    store: Any, key: str, told: Told, groups: Mapping[Scope, Sequence[Sequence[int]]], patience: timedelta
) -> str:
    """The sentence, the same on every rank. groups: the ranks that must agree, by scope. Every rank of them calls it."""
    ranks = sorted(rank for group in groups["mesh"] for rank in group)
    store.set(f"{key}/{told.rank}", json.dumps(asdict(told)))
    try:
        if told.rank == ranks[0]:
            store.wait([f"{key}/{rank}" for rank in ranks], patience)
            everyone = [Told(**json.loads(store.get(f"{key}/{rank}"))) for rank in ranks]
            store.set(f"{key}/text", sentence(everyone, groups))
        store.wait([f"{key}/text"], 2 * patience)
    except RuntimeError:  # DistStoreError is one
        missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        who = f"{ranges_in_words(missing)} did not say with what" if missing else "the first rank did not compare them"
        return f"ranks differ in what they do, and {who}. This is rank {told.rank}, at {_calls(told.calls)}."
    text: str = store.get(f"{key}/text").decode()
    return text


def sentence(everyone: Sequence[Told], groups: Mapping[Scope, Sequence[Sequence[int]]]) -> str:
    """Of the first thing in which ranks differ."""
    every = {told.rank: told for told in everyone}
    for at in zip_longest(*(told.calls for told in everyone)):
        if text := _of_call(dict(zip(every, at, strict=True)), groups, every):
            return text
    return (
        "the ranks' messages say that they differ, and all have said the same: a message arrived other than it was sent. "
        "Look for errors of the network and of memory on the hosts of this mesh."
    )


def _of_call(
    calls: Mapping[int, Mapping[str, Any] | None],
    groups: Mapping[Scope, Sequence[Sequence[int]]],
    every: Mapping[int, Told],
) -> str:
    """calls: by rank, those that should be one. "" where they are alike."""
    names = {rank: f"{call['what']} ({call['at']})" if call else "nothing" for rank, call in calls.items()}
    if len({call["what"] if call else "" for call in calls.values()}) > 1:
        return (
            f"ranks make different calls: {_by_value(names, every)}. Every rank of the mesh makes the same calls, in the "
            "same order."
        )
    differing: list[tuple[Scope, str, dict[int, str]]] = []
    for kind, of_kind in groups.items():
        facts: dict[int, Mapping[str, str]] = {
            rank: call["facts"].get(kind, {}) for rank, call in calls.items() if call is not None
        }
        for name in dict.fromkeys(name for each in facts.values() for name in each):
            values = {rank: each.get(name, "nothing") for rank, each in facts.items()}
            for group in of_kind:
                of_group = {rank: values[rank] for rank in group if rank in values}
                if len({*of_group.values()}) > 1:
                    differing.append((kind, name, of_group))
                    break
    if not differing:
        return ""
    (kind, name, of_ranks), *more = differing
    others = [name for _, name, _ in more]
    also = f" (and in {', '.join(others[:SHOWN])}{', ...' if len(others) > SHOWN else ''})" if others else ""
    return (
        f"ranks differ in {name} of {next(iter(names.values()))}{also}: {_by_value(of_ranks, every)}. {_REMEDY[kind]}"
    )


def _by_value(values: Mapping[int, str], every: Mapping[int, Told]) -> str:
    """ "4 on ranks 0-2 (host a), 3 on rank 3 (host b)": what most ranks have first, hosts where there are several."""
    by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    several = len({told.host for told in every.values()}) > 1
    told = []
    for value, ranks in sorted(by_value.items(), key=lambda each: -len(each[1])):
        hosts = dict.fromkeys(every[rank].host for rank in ranks)
        on = f" ({', '.join([*hosts][:SHOWN])})" if several else ""
        told.append(f"{value} on {ranges_in_words(ranks)}{on}")
    return ", ".join(told[:SHOWN]) + (f", and {len(told) - SHOWN} more" if len(told) > SHOWN else "")


def _calls(calls: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(f"{call['what']} ({call['at']})" for call in calls)
