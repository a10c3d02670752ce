"""Slow links (network tiers): flat or hierarchical collectives by predicted time, and axes that send much across nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

from meshkit.cluster import Cluster, Place, collective_s, hierarchical_s, place_of
from meshkit.preflight.explain._explanation import Explanation, Hierarchical, Message

CHUNKS = tuple(2**power for power in range(16, 28))
"""bytes of a chunk that are tried"""

_OUTERMOST = ("pp", "dp_replicate", "dp_shard")  # axes whose ranks lie furthest apart, in their order
_FSDP = ("parameters", "gradients")  # what units gather and reduce over the ranks of states


@dataclass(frozen=True, kw_only=True)
class CollectivesChoice:
    """Of FSDP's gathers and reductions over nodes, the faster way in the model of the cluster's links, beside kernels or not.

    chunk_bytes: the best in hierarchical ones. flat_s, hierarchical_s: of all of them in one step. mesh: dp_shard with
    the cluster's nodes told apart. `str()` is the line that `explain` prints.
    """

    cluster: str
    mesh: str
    chunk_bytes: int
    flat_s: float
    hierarchical_s: float

    @property
    def is_hierarchical(self) -> bool:
        return self.hierarchical_s < self.flat_s

    @property
    def seconds(self) -> float:
        return min(self.flat_s, self.hierarchical_s)

    def __str__(self) -> str:
        times = f"{self.flat_s * 1e3:.2f} ms flat, {self.hierarchical_s * 1e3:.2f} ms hierarchical"
        advice = "flat is faster"
        if self.is_hierarchical:
            advice = f"DataPolicy(collectives='hierarchical', chunk_bytes={self.chunk_bytes}) is faster"
        return f"{self.mesh} on {self.cluster}: gathers and reductions of a step take {times}: {advice}"


def choose_collectives(said: Explanation, cluster: Cluster) -> CollectivesChoice | None:
    """Flat or hierarchical gathers and reductions for FSDP, whichever is faster by the links. Pure.

    None where nothing of FSDP goes over several nodes with several ranks each in one hop. Nodes are the cluster's first tier.
    """
    counts: Counter[Message] = Counter()
    for sent in said.sent:
        if sent.hierarchical is None and sent.what in _FSDP and sent.message.op in ("all_gather", "reduce_scatter"):
            counts[sent.message] += sent.calls
    for call, times in _hierarchical(said):
        counts[Message(call.axis, call.op, call.size)] += times
    in_node = place_of(cluster, said.spec, "dp_shard").inside[0]
    places = {axis: place_of(cluster, said.spec, axis) for axis in {message.axis for message in counts}}
    wide = {message: times for message, times in counts.items() if _spans(places[message.axis])}
    if not wide or in_node == 1:
        return None
    flat_s = fsum(collective_s(cluster, m.op, m.size, places[m.axis]) * times for m, times in wide.items())
    by_chunk = {
        chunk: fsum(_by_nodes_s(cluster, m, places[m.axis], chunk) * times for m, times in wide.items())
        for chunk in CHUNKS
    }
    best = min(CHUNKS, key=lambda chunk: (by_chunk[chunk], -chunk))
    return CollectivesChoice(
        cluster=cluster.name,
        mesh=f"dp_shard={said.spec.dp_shard // in_node}x{in_node}",
        chunk_bytes=best,
        flat_s=flat_s,
        hierarchical_s=by_chunk[best],
    )


def _hierarchical(said: Explanation) -> Iterable[tuple[Hierarchical, int]]:
    """Hierarchical collectives of the step and how often each is called: each once, not by its chunks."""
    return {
        (sent.module, sent.phase, sent.hierarchical): sent.hierarchical for sent in said.sent if sent.hierarchical
    }.values()


def _spans(place: Place) -> bool:
    """Whether it is several nodes with equally many ranks, several of them, in each."""
    inside = place.inside[0]
    return 1 < inside < place.ranks and place.ranks % inside == 0


def _by_nodes_s(cluster: Cluster, message: Message, place: Place, chunk_bytes: int) -> float:
    inner = place.inside[0]
    inside = Place(inner, tuple(min(inner, count) for count in place.inside))
    across = Place(place.ranks // inner, tuple(max(1, count // inner) for count in place.inside))
    return hierarchical_s(cluster, message.op, message.size, inside=inside, across=across, chunk_bytes=chunk_bytes)


def link_notes(said: Explanation, cluster: Cluster) -> list[str]:
    """What `explain` prints of a cluster's links: the faster collectives, and a warning for each heavy axis on slow ones."""
    choice = choose_collectives(said, cluster)
    return [*([] if choice is None else [str(choice)]), *_heavy_axes(said, cluster)]


def _heavy_axes(said: Explanation, cluster: Cluster) -> list[str]:
    """A warning for each axis that blocks kernels and crosses nodes, with the size that stays inside and who may cross."""
    spec, node = said.spec, cluster.tiers[0]
    sizes: Counter[str] = Counter()
    for message, times in said.messages.items():
        sizes[message.axis] += message.size * times
    lines = []
    # Ranks of tp are next to one another, then those of cp; experts lie on the ranks of both.
    for axis, further_in in (("tp", 1), ("cp", spec.tp), ("ep", spec.etp)):
        if axis not in sizes or not (place := place_of(cluster, spec, axis)).outermost:
            continue
        of_axis = [(message, times) for message, times in said.messages.items() if message.axis == axis]
        seconds = fsum(collective_s(cluster, each.op, each.size, place) * times for each, times in of_axis)
        slow, fits = cluster.tiers[place.outermost], node.ranks // further_in
        advice = f"{axis}={fits} stays inside" if fits > 1 else f"the {further_in} ranks further in fill a node"
        outside = min(_OUTERMOST, key=lambda each: (sizes[each], _OUTERMOST.index(each)))
        if sizes[outside] < sizes[axis]:
            advice += f", with what is left on {outside}, which sends {sizes[outside]:,} bytes here"
        lines.append(
            f"warning: {axis}={place.ranks} crosses nodes of {node.ranks} ranks on {cluster.name}, {sizes[axis]:,} bytes and "
            f"{seconds * 1e3:.2f} ms of a step over {slow.name}: {advice}"
        )
    return lines
