"""The cluster (hardware description, topology): one kind of device, nested tiers of links, and what was measured of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, get_args

from meshkit.cluster._device import Device
from meshkit.cluster._toml import read_table, table_of, toml_text
from meshkit.cluster._unlike import Unlike
from meshkit.errors import ClusterError

Per = Literal["rank", "rail", "group"]
Level = Literal["datasheet", "measured", "traced"]
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
DATASHEETS = Path(__file__).parent / "datasheets"


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Ranks that reach one another over one kind of link: a node's NVLink, a rail of NICs, the spine above.

    ranks: consecutive ones that the tier holds. bytes_per_s: one way; per "rank" each has a link of its own into the tier,
    per "group" all ranks of the tier below share one, as a node shares its NIC. Per "rail" each has one of its own, but to
    ranks at the same place of other nodes alone (rail-only network): what an all-to-all sends to others is forwarded inside
    of a node. oversubscribed: by how much less the switches carry than their links. efficiency: the share of the bandwidth
    that a large message gets. latency_s: of one hop.
    """

    name: str
    ranks: int
    bytes_per_s: float
    latency_s: float
    per: Per = "rank"
    oversubscribed: float = 1.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if type(self.ranks) is not int or self.ranks < 1:
            raise ClusterError(f"tier {self.name!r}: ranks={self.ranks!r}: a whole number of ranks, at least 1.")
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ClusterError(
                f"tier {self.name!r}: bytes_per_s={self.bytes_per_s!r} latency_s={self.latency_s!r}: give a rate above 0 and "
                "a latency of at least 0."
            )
        if self.per not in get_args(Per):
            raise ClusterError(f"tier {self.name!r}: per={self.per!r}: choose rank, rail or group.")
        if not self.oversubscribed >= 1:
            raise ClusterError(f"tier {self.name!r}: oversubscribed={self.oversubscribed!r}: a factor of at least 1.")
        if not 0 < self.efficiency <= 1:
            raise ClusterError(f"tier {self.name!r}: efficiency={self.efficiency!r}: a share above 0 and at most 1.")

    @property
    def carried_bytes_per_s(self) -> float:
        """What a link of the tier carries of large messages."""
        return self.bytes_per_s * self.efficiency / self.oversubscribed


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured seconds of a collective on `ranks` ranks whose outermost tier is `tier`. points: (bytes, seconds), by bytes.

    Bytes are counted as `explain` counts them: an all-gather's result, a reduce-scatter's input, what a send or an all-to-all
    takes away from the rank.
    """

    op: str
    tier: str
    ranks: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple((float(size), float(seconds)) for size, seconds in self.points))
        if self.op not in OPS:
            raise ClusterError(f"collective op={self.op!r}: choose one of {', '.join(OPS)}.")
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(min(point) for point in self.points) <= 0:
            raise ClusterError(
                f"collective {self.op} on {self.tier}: points={self.points!r}: give [bytes, seconds], all above 0, by "
                "growing bytes."
            )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """By how much kernels and messages slow each other down while they run at the same time (contention)."""

    compute_slower: float = 1.15
    collective_slower: float = 1.3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 1:
                raise ClusterError(f"overlap.{name}={value!r}: a factor of at least 1.")


@dataclass(frozen=True, kw_only=True)
class Host:
    """bytes_per_s: one way between a device and its host. adam_params_per_s: of an optimizer that runs on the host.
    step_s: what a step costs beside its kernels, as data and logging. cores: where ranks compute on the host itself, so many
    at once as if each were alone; seconds of kernels are then those of all ranks of a node at once. 0: each has a device.
    memory_bytes, disk_bytes_per_s: of a node, whose ranks share them; 0: nobody says.
    """

    bytes_per_s: float = 5e10
    adam_params_per_s: float = 1e9
    step_s: float = 0.0
    cores: float = 0.0
    memory_bytes: float = 0.0
    disk_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ClusterError(f"host.{name}={value!r}: a number of at least 0.")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong. jitter: the standard deviation of a rank's step, as a share of it; the slowest rank is waited for."""

    device_mtbf_h: float = 45000.0
    restart_s: float = 600.0
    spare: float = 0.0
    jitter: float = 0.0
    storage_bytes_per_s: float = 1e11

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ClusterError(f"faults.{name}={value!r}: a number of at least 0.")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices and links. Frozen, printable, and the same in a file: `Cluster.read("h100")`, `Cluster.read("mine.toml")`.

    tiers: innermost first; each holds whole numbers of the one before, and the last holds all ranks. level: where the numbers
    are from, a datasheet, `measure-cluster`, or the trace of a run. source: of a datasheet, what it quotes. unlike: blocks of
    ranks that are slower than `device`, or further from one another than the tiers say, which are the best there are.
    Raises: ClusterError for what no machine could be.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    collectives: tuple[Measured, ...] = ()
    overlap: Overlap = field(default_factory=Overlap)
    host: Host = field(default_factory=Host)
    faults: Faults = field(default_factory=Faults)
    level: Level = "datasheet"
    source: str = ""
    unlike: Unlike | None = None

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ClusterError(
                f"cluster {self.name!r} has no tier. Give one, with the ranks of a node and their bandwidth."
            )
        for inner, outer in zip(self.tiers, self.tiers[1:], strict=False):
            if outer.ranks % inner.ranks or outer.ranks <= inner.ranks:
                raise ClusterError(
                    f"cluster {self.name!r}: tier {outer.name!r} of {outer.ranks} ranks comes after {inner.name!r} of "
                    f"{inner.ranks}. Tiers are nested, innermost first, each a multiple of the one before."
                )
        if self.level not in get_args(Level):
            raise ClusterError(
                f"cluster {self.name!r}: level={self.level!r}: choose one of {', '.join(get_args(Level))}."
            )
        names = [tier.name for tier in self.tiers]
        for measured in self.collectives:
            if measured.tier not in names:
                raise ClusterError(
                    f"collective {measured.op}: there is no tier {measured.tier!r}, only {', '.join(names)}."
                )
        if self.unlike is not None:
            self._refuse_unlike(self.unlike)

    def _refuse_unlike(self, unlike: Unlike) -> None:
        if unlike.ranks != self.ranks:
            raise ClusterError(
                f"cluster {self.name!r}: unlike has {unlike.blocks} blocks of {unlike.each}, {unlike.ranks} ranks, but the "
                f"last tier holds {self.ranks}. Give every block."
            )
        sizes = [1, *(tier.ranks for tier in self.tiers)]
        if unlike.each not in sizes:
            raise ClusterError(
                f"cluster {self.name!r}: unlike.each={unlike.each} ranks are no tier's. Blocks are of {sizes[:-1]} ranks."
            )
        if max(unlike.memory_bytes, default=0.0) > self.device.memory_bytes:
            raise ClusterError(
                f"cluster {self.name!r}: unlike has devices of {max(unlike.memory_bytes):g} bytes, but the largest's are "
                f"device.memory_bytes={self.device.memory_bytes:g}. Give that of the largest there."
            )
        outer = [tier for tier in self.tiers if tier.ranks > unlike.each]
        fastest, nearest = max(tier.bytes_per_s for tier in outer), min(tier.latency_s for tier in outer)
        for link in map(unlike.link, permutations(range(unlike.blocks), 2)):
            if link is not None and (link.bytes_per_s > fastest or link.latency_s < nearest):
                raise ClusterError(
                    f"cluster {self.name!r}: unlike has a link of {link.bytes_per_s:g} bytes/s and {link.latency_s:g} s, but "
                    f"the tiers' best is {fastest:g} and {nearest:g}. Give a tier the best link there is."
                )

    @property
    def ranks(self) -> int:
        """The most that it holds."""
        return self.tiers[-1].ranks

    def slowed(self, speed: float) -> Cluster:
        """With devices that compute at so much of their speed."""
        return self if speed == 1 else replace(self, device=self.device.slowed(speed))

    @property
    def crowding(self) -> float:
        """By how much slower kernels are while all ranks of a node compute than while one does."""
        return max(1.0, self.tiers[0].ranks / self.host.cores) if self.host.cores else 1.0

    @staticmethod
    def names() -> list[str]:
        """Of the datasheets that come with meshkit."""
        return sorted(path.stem for path in DATASHEETS.glob("*.toml"))

    @staticmethod
    def read(name: str | os.PathLike[str]) -> Cluster:
        """A datasheet by its name, or a file. Raises: ClusterError, also for what is not there."""
        path = Path(name)
        if path.suffix != ".toml":
            path = DATASHEETS / f"{str(name).lower()}.toml"
        if not path.is_file():
            raise ClusterError(
                f"cluster {str(name)!r}: there is no such file or datasheet. Give a .toml file, as measure-cluster writes "
                f"it, or one of {', '.join(Cluster.names())}."
            )
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ClusterError(f"{name}: not UTF-8 at byte {error.start}. Write it again by measure-cluster.") from None
        return Cluster.from_toml(text, source=str(name))

    @staticmethod
    def from_toml(text: str, *, source: str = "cluster") -> Cluster:
        """source: for errors. Raises: ClusterError naming it and the place."""
        return read_table(Cluster, text, source=source)

    def to_toml(self) -> str:
        return toml_text(table_of(self))

    def write(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def changed(self, **fields: float) -> Cluster:
        """With other numbers, each named by its path: `changed(**{"device.launch_s": 5e-6, "faults.jitter": 0.02})`."""
        changed = self
        for path, value in fields.items():
            changed = _set(changed, path.split("."), value)
        return changed


def _set(record: Any, path: list[str], value: float) -> Any:
    name, *rest = path
    if isinstance(record, tuple):
        index = int(name)
        return (*record[:index], _set(record[index], rest, value) if rest else value, *record[index + 1 :])
    if not hasattr(record, name):
        raise ClusterError(f"{type(record).__name__} has no number {name!r}.")
    new = _set(getattr(record, name), rest, value) if rest else value
    return replace(record, **{name: new})
