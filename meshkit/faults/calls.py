"""Calls of the ranks beside each other (flight recorder): which call is missing, and on which rank; rings in files.

mk.run_main(main, calls="runs/calls")
python -m meshkit calls runs/calls
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshkit.core.calls import Call, Meeting, ring
from meshkit.errors import PlanError
from meshkit.mesh.ranges import ranges_in_words

IN_A_HEARTBEAT = 16  # meetings, those of the last calls
SHOWN = 4  # sentences
LISTED = 12  # calls of each rank


@dataclass(frozen=True, kw_only=True)
class Last:
    """The call of a rank in one meeting that it waits for, or its last. id: of the meeting, the same on all its ranks. made:
    how many it has made there, which may be more than `count`: receives are posted ahead. waits: for it, now."""

    id: str
    axis: str
    ranks: tuple[int, ...]
    message: bool
    count: int
    op: str
    size: int
    waits: bool
    made: int

    @property
    def text(self) -> str:
        """`call 4711 on tp (all_reduce of 2.1 MB)`."""
        size = f" of {_bytes(self.size)}" if self.size else ""
        way = f" from rank {self.ranks[0]} to rank {self.ranks[1]}" if self.message else ""
        return f"call {self.count} on {self.axis or ranges_in_words(self.ranks)} ({self.op}{size}{way})"


def last_calls() -> list[Last]:
    """Of this process, for its heartbeat: of each meeting the call that is waited for, else the newest."""
    newest = {id(meeting): meeting.last for meeting in list(ring.meetings.values()) if meeting.last is not None}
    waiting = {id(call.meeting): call for call in reversed(list(ring.calls)) if waits(call)}
    calls = list((newest | waiting).values())
    calls.sort(key=lambda call: (waits(call), call.began), reverse=True)
    return [_last(call) for call in calls[:IN_A_HEARTBEAT]]


def waits(call: Call) -> bool:
    return call.waited is not None and call.ended is None


def packed(calls: Iterable[Last]) -> list[list[Any]]:
    """For a heartbeat. Ranks at equal distances are three numbers."""
    return [
        [
            last.id,
            last.axis,
            _packed_ranks(last.ranks),
            last.message,
            last.count,
            last.op,
            last.size,
            last.waits,
            last.made,
        ]
        for last in calls
    ]


def unpacked(rows: Iterable[Sequence[Any]]) -> list[Last]:
    return [
        Last(
            id=name,
            axis=axis,
            ranks=tuple(ranks if isinstance(ranks, list) else range(*map(int, ranks.split(":")))),
            message=message,
            count=count,
            op=op,
            size=size,
            waits=is_waiting,
            made=made,
        )
        for name, axis, ranks, message, count, op, size, is_waiting, made in rows
    ]


def missing_calls(calls: Mapping[int, Sequence[Last]], gone: Iterable[int] = ()) -> list[str]:
    """Sentences on the calls in which ranks wait for others, of the last calls of each rank: who has not made them, or has
    made another. The ranks that wait for nobody come first, since the others wait for them.

    gone: ranks that have ended or are silent. What they said last is too old to say how far they came."""
    calls = {rank: own for rank, own in calls.items() if rank not in (gone := set(gone))}
    waiting: dict[str, dict[int, Last]] = {}
    for rank, own in calls.items():
        for last in own:
            if last.waits:
                waiting.setdefault(last.id, {})[rank] = last
    found: list[tuple[bool, str]] = []
    for name, of_rank in waiting.items():
        count = min(last.count for last in of_rank.values())
        inside = {rank: last for rank, last in of_rank.items() if last.count == count}
        one = next(iter(inside.values()))
        others = {rank: _of(calls.get(rank, ()), name) for rank in one.ranks if rank not in inside}
        behind = [rank for rank, last in others.items() if last is None or last.made < count]
        unlike = _unlike(one, inside)
        if unlike:
            found.append((False, unlike))
        elif behind:
            lost = [rank for rank in behind if rank in gone]
            itself = not lost and any(last.waits for rank in behind for last in calls.get(rank, ()))
            found.append((itself, f"{_missing(lost or behind, one, lost=bool(lost))}: {_wait(list(inside))} in it."))
    return [said for _, said in sorted(found)[:SHOWN]]


def _missing(ranks: Sequence[int], one: Last, *, lost: bool) -> str:
    few = len(ranks) == 1
    verb = ("is" if few else "are") + " missing in" if lost else ("has" if few else "have") + " not made"
    return f"{ranges_in_words(ranks)} {verb} {one.text}"


def waits_in(calls: Sequence[Last], rank: int) -> str:
    """What this rank waits in, and with whom: "call 4711 on tp (all_reduce of 2.1 MB), with ranks 1-3"; or "". A thread that
    writes a checkpoint may wait beside the training."""
    waiting = [last for last in calls if last.waits][:SHOWN]
    others = [ranges_in_words([each for each in last.ranks if each != rank]) for last in waiting]
    return ", and in ".join(f"{last.text}, with {names}" for last, names in zip(waiting, others, strict=True))


def _unlike(one: Last, inside: Mapping[int, Last]) -> str:
    """Where ranks wait in the same count and made different calls."""
    if one.message:
        return ""
    kinds: dict[tuple[str, int], list[int]] = {}
    for rank, last in inside.items():
        kinds.setdefault((last.op, last.size if last.op in _SAME_SIZE else 0), []).append(rank)
    if len(kinds) < 2:
        return ""
    texts = [
        f"{op}{f' of {_bytes(size)}' if size else ''} on {ranges_in_words(ranks)}"
        for (op, size), ranks in kinds.items()
    ]
    return f"ranks made different calls as call {one.count} on {one.axis or ranges_in_words(one.ranks)}: {', '.join(texts)}."


_SAME_SIZE = ("all_reduce", "broadcast")  # others may be uneven


def _of(calls: Iterable[Last], name: str) -> Last | None:
    return next((last for last in calls if last.id == name), None)


def _wait(ranks: Sequence[int]) -> str:
    return f"{ranges_in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _last(call: Call) -> Last:
    meeting = call.meeting
    return Last(
        id=short_id(meeting),
        axis=meeting.axis,
        ranks=meeting.ranks,
        message=meeting.is_message,
        count=call.count,
        op=call.op,
        size=call.size,
        waits=waits(call),
        made=meeting.count,
    )


def short_id(meeting: Meeting) -> str:
    """The same on all its ranks."""
    text = f"{meeting.name} {meeting.ranks if meeting.is_message else ''}"
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _packed_ranks(ranks: tuple[int, ...]) -> str | list[int]:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    line = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step) if step else range(0)
    return f"{line.start}:{line.stop}:{line.step}" if tuple(line) == ranks else list(ranks)


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


class CallFiles:
    """A folder with the ring of each rank, written when something is reported and when the process ends. Built as it begins:
    files that were written before are of another job.

    Raises: PlanError for a folder that cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder, self._began = Path(folder), time.time()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanError(
                f"calls={str(folder)!r} cannot be written: {error.strerror}. Give a folder of yours."
            ) from error

    def write(self, rank: int, location: str) -> None:
        now = time.monotonic()
        rows = [
            {
                **asdict(_last(call)),
                "step": call.step,
                "place": call.place,
                "began_s_ago": now - call.began,
                "waited_s": None if call.waited is None else (call.ended or now) - call.waited,
                "ended": call.ended is not None,
            }
            for call in list(ring.calls)
        ]
        times = {"began": self._began, "time": time.time()}
        record = {"rank": rank, "host": socket.gethostname(), **times, "location": location, "calls": rows}
        file = self.folder / f"rank-{rank}.json"
        beside = file.with_suffix(".partial")
        beside.write_text(json.dumps(record))
        beside.replace(file)


def read_calls(folder: str | os.PathLike[str]) -> str:
    """What the files of `run_main(calls=folder)` say: the calls that are missing, and where each rank was. Files that were
    written before the newest job began are left out, and named.

    Raises: PlanError where there are none, and for a file that is not one.
    """
    files = sorted(Path(folder).glob("rank-*.json"))
    if not files:
        raise PlanError(f"{str(folder)!r} has no rank-*.json. run_main(main, calls=FOLDER) writes them.")
    records, newest = {}, {}
    for file in files:
        try:
            record = json.loads(file.read_text())
            newest[record["rank"]], records[record["rank"]] = _newest(record["calls"]), record
            lines = [record[key] for key in ("host", "location", "began", "time")] + [*map(_line, record["calls"])]
        except (ValueError, TypeError, KeyError) as error:
            raise PlanError(
                f"{file} is not what run_main(main, calls=FOLDER) writes ({type(error).__name__}: {error}). Take it away."
            ) from error
    began = max(record["began"] for record in records.values())
    before = [rank for rank, record in sorted(records.items()) if record["time"] < began]
    for rank in before:
        del records[rank], newest[rank]
    lines = missing_calls(newest) or ["No rank of these files waits for a call that another has not made."]
    if before:
        lines += [f"Left out, since they were written before this job began: the files of {ranges_in_words(before)}."]
    for rank, record in sorted(records.items()):
        lines += ["", f"rank {rank} on {record['host']}, at {record['location'] or 'no step'}:"]
        lines += [_line(row) for row in record["calls"][-LISTED:]]
    return "\n".join(lines)


def _newest(rows: Iterable[Mapping[str, Any]]) -> list[Last]:
    names = Last.__dataclass_fields__
    last = {row["id"]: Last(**{name: row[name] for name in names} | {"ranks": tuple(row["ranks"])}) for row in rows}
    return list(last.values())


def _line(row: Mapping[str, Any]) -> str:
    last = _newest([row])[0]
    state = "is waited for" if last.waits else "is over" if row["ended"] else "is under way"
    waited = "" if row["waited_s"] is None else f", waited {row['waited_s']:.3g} s"
    return f"  step {row['step']}: {last.text} began {row['began_s_ago']:.3g} s ago{waited}, {state}, {row['place']}"
