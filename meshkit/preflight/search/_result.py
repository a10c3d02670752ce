"""Found: the result of `search`, and its printed form."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshkit.cluster import memory_of
from meshkit.errors import MeshkitError
from meshkit.preflight._flags import flags_of
from meshkit.preflight._format import format_bytes, table_lines
from meshkit.preflight.estimate import Composed, ComposedRank
from meshkit.preflight.forecast import Forecast
from meshkit.preflight.search._host import fits_host, node_bytes
from meshkit.strategy import Strategy

SHOWN = 2  # lines of a ledger that a neighbour's line names


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One strategy, priced. cost: what the goal makes of its forecast; the least is best."""

    strategy: Strategy
    forecast: Forecast
    memory: Composed
    cost: float

    @property
    def seconds(self) -> float:
        return self.forecast.seconds

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    @property
    def ranks(self) -> int:
        return self.forecast.ranks

    def tightest(self, device_bytes: int) -> tuple[ComposedRank, int]:
        """The rank of pp that has least room beside what it needs, and the bytes of its smallest device."""
        spec, cluster = self.forecast.profile.spec, self.forecast.cluster
        rooms = [int(min(device_bytes, memory_of(cluster, spec, rank.pp_rank))) for rank in self.memory.ranks]
        return min(zip(self.memory.ranks, rooms, strict=True), key=lambda each: each[1] - each[0].peak_bytes)

    def fits(self, device_bytes: int | None) -> bool:
        """On the devices, and on the host of a node where the cluster says how much that has."""
        if not fits_host(self.memory, self.forecast.cluster):
            return False
        if device_bytes is None:
            return True
        rank, room = self.tightest(device_bytes)
        return rank.peak_bytes <= room

    def __str__(self) -> str:
        return f"{self.seconds:.4g} s, {format_bytes(self.peak_bytes)}: {flags_of(self.strategy)}"


@dataclass(frozen=True)
class Neighbour:
    """A strategy that differs from the best in one choice, and why it loses."""

    change: str
    why: str

    def __str__(self) -> str:
        return f"{self.change}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found. `str()` is the printed form.

    winner: None where nothing fits. front: of what was priced and fits, all of which nothing else is at least as good in
    seconds, bytes, ranks and joules. tried: all that was priced;
    what does not fit only by an exhaustive search. refused: by `resolve`'s own text -> how many. unfit:
    how many needed more than the device has. cut: how many could not be better than the best by their lower bound, and were
    not priced. least: the fewest bytes that were seen, and of what. neighbours: one line each. gap:
    of a search that was ended before it was over, by which share of the winner's cost something else may be better.
    """

    winner: Tried | None
    front: tuple[Tried, ...]
    tried: tuple[Tried, ...]
    refused: Mapping[str, int]
    unfit: int
    cut: int
    least: tuple[int, Strategy] | None
    neighbours: tuple[Neighbour, ...]
    device_bytes: int | None
    took_s: float
    gap: float = 0.0

    @property
    def best(self) -> Strategy | None:
        """For `parallelize(model, mk.init_mesh(found.best.mesh), found.best)`."""
        return None if self.winner is None else self.winner.strategy

    @property
    def flags(self) -> str:
        """The winner's flags of a recipe."""
        return "" if self.best is None else flags_of(self.best)

    def write(self, path: str | os.PathLike[str]) -> None:
        """The winner as TOML, for `Strategy.read` and a recipe's --strategy."""
        assert self.best is not None, "nothing fits"
        self.best.write(path)

    def __str__(self) -> str:
        refused = sum(self.refused.values())
        counts = (
            f"{len(self.tried):,} priced, {refused:,} refused, {self.unfit:,} do not fit, {self.cut:,} cut by bounds"
        )
        lines = [f"{counts}, in {self.took_s:.1f} s"]
        if self.winner is None:
            room = "" if self.device_bytes is None else f" in {format_bytes(self.device_bytes)}"
            fewest = (
                "" if self.least is None else f"; the least is {format_bytes(self.least[0])}: {flags_of(self.least[1])}"
            )
            looked = f" of what was looked at before the limit, which {self.cut:,} were not" if self.cut else ""
            lines.append(f"nothing fits{room}{looked}{fewest}")
        else:
            if self.gap:
                lines.append(f"ended before all was looked at: nothing is better by more than {self.gap:.1%}")
            away = max(rank.offloaded_bytes for rank in self.winner.memory.ranks)
            peak = f"peak {format_bytes(self.winner.peak_bytes)}"
            peak += f", {format_bytes(away)} of activations are offloaded" if away else ""
            lines += ["", str(self.winner.forecast), peak, "", self.flags]
            if self.neighbours:
                lines += ["", *map(str, self.neighbours)]
            rows = [("seconds", "peak", "flags")]
            rows += [
                (f"{each.seconds:.4g}", format_bytes(each.peak_bytes), flags_of(each.strategy)) for each in self.front
            ]
            lines += ["", *table_lines(rows, right=(0, 1))]
        for text, count in sorted(self.refused.items(), key=lambda item: -item[1]):
            lines.append(f"refused {count:,}: {text}")
        return "\n".join(lines)


def reason_of(error: MeshkitError) -> str:
    return str(error).splitlines()[0]


def pareto(tried: Iterable[Tried]) -> tuple[Tried, ...]:
    """By seconds: those than which nothing is at least as good in seconds, bytes, ranks and joules, where those are known."""
    front: list[Tried] = []
    for each in sorted(tried, key=lambda one: (one.seconds, *_beside_seconds(one))):
        if not any(
            all(a <= b for a, b in zip(_beside_seconds(other), _beside_seconds(each), strict=True)) for other in front
        ):
            front.append(each)
    return tuple(front)


def _beside_seconds(tried: Tried) -> tuple[float, ...]:
    return tried.peak_bytes, tried.ranks, tried.forecast.joules or 0.0


def why_it_loses(best: Tried, other: Tried, device_bytes: int | None) -> str:
    """As "3.1 % slower: tp 2.0 s → 0.9 s, bubble +1.4 s"; or by how much it does not fit, and where."""
    if not other.fits(device_bytes):
        if not fits_host(other.memory, other.forecast.cluster):
            cluster = other.forecast.cluster
            held, has = node_bytes(other.memory, cluster), int(cluster.host.memory_bytes)
            return f"does not fit, {format_bytes(held)} of {format_bytes(has)} on the host of a node"
        assert device_bytes is not None, "else the host alone says what fits"
        rank, room = other.tightest(device_bytes)
        where = rank.where.removeprefix("the ")
        return f"does not fit, {format_bytes(rank.peak_bytes)} of {format_bytes(room)} in the {where}"
    names = dict.fromkeys([*best.forecast.ledger, *other.forecast.ledger])
    pairs = [(name, best.forecast.ledger.get(name, 0.0), other.forecast.ledger.get(name, 0.0)) for name in names]
    largest = sorted(pairs, key=lambda item: -abs(item[2] - item[1]))[:SHOWN]
    parts = ", ".join(f"{name} {was:.3g} → {now:.3g} s" for name, was, now in largest if was != now)
    ratio = other.cost / best.cost - 1
    return f"{'as good' if ratio <= 0 else f'{ratio:.1%} worse'}" + (f": {parts}" if parts else "")
