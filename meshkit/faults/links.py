"""Slow links (interconnect, bandwidth): how long the calls over each group of the mesh travel, apart from late ranks.

Of the ranks of a call the last to come waits for nobody: the shortest wait in a group is what the wire costs, and what the
others wait longer is lateness. No clock of two hosts is compared. A message has one sender: its way is the time from its
sending to its arrival, and since clocks differ, the mean of both ways of a pair.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from meshkit.core.calls import axis_of, ring
from meshkit.faults.calls import short_id
from meshkit.mesh import Mesh
from meshkit.mesh.ranges import ranges_in_words

CALLS = 64  # of one meeting in a step, the first: what a rank tells the others is bounded
SLOW = 2.0  # times as long as on the other links of the axis
CALL_S = 1e-4  # counts of a call, however long threads waited for a processor: nothing is a multiple of nothing
SHARE = 0.05  # of a step: less is not worth a sentence
IN_A_ROW = 2  # reports: on a busy machine one may find any link slow
UNDECIDED = 2  # reports between them that say neither, since threads waited for a processor for as long
KEPT = 8  # reports of a link

# [Note: what tells a slow link from a busy machine]
# A process that waits for a processor makes each of its calls longer. So a link is compared in three ways. With its axis: in
# its quickest step it must take twice as long as others, and longer than they do in their slowest. With itself: the same of
# what it took at its best, which counts for longer where its ranks also work slower than they did at their best. And over
# time: in two reports one after the other, of which the second comes at once. Where the kernel says how long threads waited
# for a processor, a link is not blamed for that: 7 calls of 20 us were 200 times as long when each waited for one. It is
# taken off each call, for the seconds in which that call was under way. (Waits of the whole step are more than a slow link
# costs on a busy machine, and no link was named there.) It may be more than they added: the wire is slow while a thread
# waits, too. So a report in which that alone makes a link quick is no word against it: two of four reports must say that it
# is slow, and none that it is quick.


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A call of one rank in a measured step. key: of the meeting. began, waited, ended: by this rank's clock. starved_s: in
    which what waits for it had no processor; carriers_starved_s: the threads that carry it."""

    axis: str
    key: str
    ranks: tuple[int, ...]
    message: bool
    count: int
    size: int
    began: float
    waited: float
    ended: float
    starved_s: float = 0.0
    carriers_starved_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """The links among some ranks on an axis. wire_s: seconds a step in which the last of them waits, for the wire alone.
    late_s: seconds a step that all of them together wait for ranks that come late. bytes_per_s: of the calls, effective.
    most_s: `wire_s` of the slowest measured step, where that is of the quickest. starved_s: what calls of that step may have
    taken longer since threads had no processor. reference_s: `wire_s` of other links of the axis, or the least of its own, by
    the lower; most_of_reference_s: their slowest step. in_a_row: reports in which it took much longer, up to this one,
    none between in which it did not; 1 at most where this one says neither."""

    axis: str
    ranks: tuple[int, ...]
    calls: int
    bytes_per_s: float
    wire_s: float
    late_s: float
    most_s: float = 0.0
    starved_s: float = 0.0
    reference_s: float = 0.0
    most_of_reference_s: float = 0.0
    in_a_row: int = 0

    @property
    def name(self) -> str:
        if len(self.ranks) == 2:
            return f"the link between ranks {self.ranks[0]} and {self.ranks[1]} on {self.axis}"
        return f"a link among {ranges_in_words(self.ranks)} on {self.axis}"

    @property
    def over_reference(self) -> float:
        return self.wire_s / self.reference_s if self.reference_s > 0 else 1.0

    @property
    def is_slow(self) -> bool:
        return self.in_a_row >= IN_A_ROW

    def stands_out(self, step_s: float) -> bool:
        """In this report. See [Note: what tells a slow link from a busy machine]."""
        longer = self.over_reference > SLOW and self.wire_s > self.most_of_reference_s
        return longer and self.wire_s - self.reference_s > SHARE * step_s

    def __str__(self) -> str:
        return (
            f"{self.name} is slow: {self.calls} calls of a step take {self.wire_s:.3g} s on the wire, "
            f"{self.over_reference:.1f} times as long as usual on this axis ({self.bytes_per_s / 1e6:.3g} MB/s)."
        )


def samples_since(began: float) -> list[Sample]:
    """Of this rank's ring: calls with an end that began since, the first `CALLS` of each meeting."""
    samples: list[Sample] = []
    seen: dict[int, int] = defaultdict(int)
    for call in list(ring.calls):
        meeting = call.meeting
        if call.began < began or call.waited is None or call.ended is None or seen[id(meeting)] >= CALLS:
            continue
        seen[id(meeting)] += 1
        samples.append(
            Sample(
                axis=meeting.axis,
                key=short_id(meeting),
                ranks=meeting.ranks,
                message=meeting.is_message,
                count=call.count,
                size=call.size,
                began=call.began,
                waited=call.waited,
                ended=call.ended,
                starved_s=call.starved_s,
                carriers_starved_s=call.carriers_starved_s,
            )
        )
    return samples


def gather_links(mesh: Mesh, steps: Sequence[Sequence[Sample]]) -> list[Link]:
    """The links whose first rank this is. Every rank of the mesh calls. Wire: of each of its groups, a gather of objects."""
    assert mesh.members is not None
    groups = {**mesh.members.by_axes, ("all",): mesh.group}
    links: list[Link] = []
    for group in groups.values():
        if group.size() == 1:
            continue
        ranks = dist.get_process_group_ranks(group)
        axis = axis_of(group.group_name)
        own = [[each for each in step if _is_of(each, axis, ranks)] for step in steps]
        every: list[list[list[Sample]]] = [own for _ in ranks]
        dist.all_gather_object(every, own, group=group)
        by_rank = dict(zip(ranks, every, strict=True))
        if dist.get_rank() == ranks[0]:
            links += links_of(axis, by_rank)
    return links


def _is_of(sample: Sample, axis: str, ranks: Sequence[int]) -> bool:
    return sample.axis == axis and set(sample.ranks) <= set(ranks)


def links_of(axis: str, by_rank: Mapping[int, Sequence[Sequence[Sample]]]) -> list[Link]:
    """Of one axis: by rank, the calls of each step. The quickest step counts: noise only ever adds time. What processors that
    did not come may have added is known of each step; the most that a step does not owe to that is the link's."""
    steps = [dict(zip(by_rank, calls, strict=True)) for calls in zip(*by_rank.values(), strict=True)]
    messages = [_messages(step) for step in steps]
    clocks = _clocks(messages)
    found: dict[tuple[int, ...], list[_Passed]] = defaultdict(list)
    for step, ways in zip(steps, messages, strict=True):
        passed: dict[tuple[int, ...], _Passed] = defaultdict(_Passed)
        # Collectives and messages of the same ranks add up: the quicker of the two would hide what the other takes.
        _add_collectives(passed, step)
        _add_messages(passed, ways, clocks)
        for ranks, own in passed.items():
            found[ranks].append(own)
    links = []
    for ranks, each in found.items():
        quickest, most_s = min(each, key=lambda own: own.wire_s), max(own.wire_s - own.starved_s for own in each)
        starved_s = max(0.0, quickest.wire_s - most_s)
        links.append(replace(quickest.link(axis, ranks, starved_s), most_s=most_s))
    return links


@dataclass
class _Passed:
    """Calls of a step on one link, added up. taken_s: seconds that they were under way. starved_s: of `wire_s`, what threads
    that waited for a processor can have added."""

    calls: int = 0
    size: int = 0
    taken_s: float = 0.0
    wire_s: float = 0.0
    late_s: float = 0.0
    starved_s: float = 0.0

    def add(self, *, size: int, taken_s: float, waits_s: Sequence[float], wire_s: float, starved_s: float) -> None:
        """A call. waits_s: of each rank that waits for it; wire_s: of these, what the last to come waits."""
        starved_s = max(0.0, min(wire_s - CALL_S, starved_s))
        self.calls, self.size, self.taken_s = self.calls + 1, self.size + size, self.taken_s + taken_s
        self.wire_s, self.starved_s = self.wire_s + wire_s, self.starved_s + starved_s
        self.late_s += max(0.0, sum(waits_s) - len(waits_s) * wire_s)

    def link(self, axis: str, ranks: tuple[int, ...], starved_s: float) -> Link:
        return Link(
            axis=axis,
            ranks=ranks,
            calls=self.calls,
            bytes_per_s=self.size / max(self.taken_s, 1e-9),
            wire_s=self.wire_s - starved_s,
            late_s=self.late_s,
            starved_s=starved_s,
        )


def _add_collectives(passed: dict[tuple[int, ...], _Passed], step: Mapping[int, Sequence[Sample]]) -> None:
    calls: dict[tuple[tuple[int, ...], str, int], list[Sample]] = defaultdict(list)
    for samples in step.values():
        for sample in samples:
            if not sample.message:
                calls[sample.ranks, sample.key, sample.count].append(sample)
    for (ranks, _, _), samples in calls.items():
        if len(samples) == len(ranks):  # of all its ranks
            waits_s = [sample.ended - sample.waited for sample in samples]
            last = samples[waits_s.index(min(waits_s))]
            passed[ranks].add(
                size=max(sample.size for sample in samples),
                taken_s=min(sample.ended - sample.began for sample in samples),
                waits_s=waits_s,
                wire_s=min(waits_s),
                starved_s=last.starved_s + sum(sample.carriers_starved_s for sample in samples),
            )


_Ways = dict[tuple[int, ...], list[tuple[Sample, Sample]]]  # by (source, target): both ends of each message


def _messages(step: Mapping[int, Sequence[Sample]]) -> _Ways:
    ways: _Ways = defaultdict(list)
    sent = {(s.key, s.count): s for rank, samples in step.items() for s in samples if s.message and s.ranks[0] == rank}
    for rank, samples in step.items():
        for sample in samples:
            if sample.message and sample.ranks[1] == rank and (sender := sent.get((sample.key, sample.count))):
                ways[sample.ranks].append((sender, sample))
    return ways


def _clocks(steps: Sequence[_Ways]) -> dict[tuple[int, ...], float]:
    """By (source, target) with messages both ways, by how much the target's clock is ahead: half of what the quickest
    message seems to take longer than the quickest back: for another the receiver may come late."""
    least: dict[tuple[int, ...], float] = {}
    for ways in steps:
        for way, messages in ways.items():
            least[way] = min([got.ended - gave.began for gave, got in messages] + [least.get(way, float("inf"))])
    return {way: (least[way] - least[way[::-1]]) / 2 for way in least if way[::-1] in least}


def _add_messages(passed: dict[tuple[int, ...], _Passed], ways: _Ways, clocks: Mapping[tuple[int, ...], float]) -> None:
    for way, messages in ways.items():
        if way not in clocks:  # one clock against another says nothing
            continue
        for gave, got in messages:
            way_s, waited_s = max(0.0, got.ended - gave.began - clocks[way]), got.ended - got.waited
            starved_s = gave.carriers_starved_s + got.carriers_starved_s + got.starved_s
            wire_s = min(way_s, waited_s)
            passed[min(way), max(way)].add(
                size=gave.size, taken_s=way_s, waits_s=[waited_s], wire_s=wire_s, starved_s=starved_s
            )


@dataclass
class _Known:
    """Of a link in reports in which it did not stand out, and how often in a row it did since; undecided: since then."""

    least_s: float = float("inf")
    most_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))  # of each report
    in_a_row: int = 0
    undecided: int = 0


class LinkHistory:
    """What the links of a mesh took in earlier reports, to which those of a new one are compared."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, tuple[int, ...]], _Known] = {}
        self._least_work_s: dict[int, float] = {}

    def compared(self, links: Iterable[Link], *, work_s: Mapping[int, float], step_s: float) -> tuple[Link, ...]:
        """With what each is compared to, and whether it stands out. work_s: by rank, without its waits, in a step."""
        pace: dict[int, float] = {}  # of each rank: a busy machine slows its work down too
        for rank, seconds in work_s.items():
            least_s = self._least_work_s[rank] = min(seconds, self._least_work_s.get(rank, seconds))
            pace[rank] = seconds / least_s if least_s > 0 else 1.0
        links = sorted(links, key=lambda link: (link.axis, link.ranks))
        return tuple(self._compared(link, links, min(pace[rank] for rank in link.ranks), step_s) for link in links)

    def _compared(self, link: Link, links: Sequence[Link], pace: float, step_s: float) -> Link:
        known = self._links.setdefault((link.axis, link.ranks), _Known())
        references = []  # (seconds, of their slowest step)
        others = [
            other
            for other in links
            if other.axis == link.axis and other.ranks != link.ranks and len(other.ranks) == len(link.ranks)
        ]
        if others:
            wire_s = statistics.median_low(other.wire_s for other in others)
            references.append((wire_s, max(other.most_s for other in others if other.wire_s <= wire_s)))
        if known.most_s:
            references.append((pace * known.least_s, pace * statistics.median_low(known.most_s)))
        # The lower: or a link that is slow from the start, or slow with all others, would be usual.
        reference_s, most_s = min(references, default=(link.wire_s, link.wire_s))
        link = replace(link, reference_s=min(reference_s, link.wire_s), most_of_reference_s=most_s)
        unexcused = replace(link, wire_s=link.wire_s + link.starved_s)
        if link.stands_out(step_s):
            known.in_a_row, known.undecided = known.in_a_row + 1, 0
        elif known.in_a_row and known.undecided < UNDECIDED and unexcused.stands_out(step_s):
            known.undecided += 1
            return replace(link, in_a_row=1)
        else:
            known.in_a_row = known.undecided = 0
            known.least_s = min(known.least_s, link.wire_s)
            known.most_s.append(link.most_s)
        return replace(link, in_a_row=known.in_a_row)
