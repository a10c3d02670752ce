"""Timeline: what a rank allocates and frees in a step, as a row of swings, and the highest sum of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshkit.preflight.estimate._replay import Swing, Totals
from meshkit.preflight.estimate._tracker import GROUPS, HOST

_NOTHING: Totals = (0,) * len(GROUPS)


class Timeline:
    """Swings are known by numbers; `row` has those of the step in order, `owners` whose each is."""

    def __init__(self, begin: Totals) -> None:
        self.row: list[int] = []
        self.owners: list[str] = []
        self._swings: list[Swing] = [Swing(begin, begin, "")]
        self._known: dict[object, int] = {}
        self.row.append(0)
        self.owners.append("")

    def number(self, swing: Swing) -> int:
        key = id(swing)  # kept alive by the list
        if key not in self._known:
            self._known[key] = len(self._swings)
            self._swings.append(swing)
        return self._known[key]

    def swing(self, swing: Swing, owner: str) -> None:
        self.row.append(self.number(swing))
        self.owners.append(owner)

    def change(self, group: int, size: int, where: str, owner: str) -> None:
        """One storage comes or goes."""
        if not size:
            return
        key = (group, size, where)
        if key not in self._known:
            left = [0] * len(GROUPS)
            left[group] = size
            self._known[key] = len(self._swings)
            self._swings.append(Swing(tuple(left), tuple(left) if size > 0 else _NOTHING, where))
        self.row.append(self._known[key])
        self.owners.append(owner)

    def folded(self, start: int) -> tuple[Swing, str]:
        """All since that length of the row as one swing, and the owner at its highest."""
        level, left, top = 0, [0] * len(GROUPS), -1
        highest, where, owner = _NOTHING, "", ""
        for number, each in zip(self.row[start:], self.owners[start:], strict=True):
            swing = self._swings[number]
            if level + swing.rise > top:
                top, where, owner = level + swing.rise, swing.where, each
                highest = tuple(before + size for before, size in zip(left, swing.highest, strict=True))
            level += swing.net
            left = [before + size for before, size in zip(left, swing.left, strict=True)]
        return Swing(tuple(left), highest, where), owner

    def peak(self) -> tuple[Totals, str, str]:
        """(sums of groups, where, the owner) at the highest moment."""
        row = np.array(self.row)
        net = np.array([swing.net for swing in self._swings])[row]
        rise = np.array([swing.rise for swing in self._swings])[row]
        level = np.cumsum(net) - net + rise
        at = int(level.argmax())
        before = np.bincount(row[:at], minlength=len(self._swings))
        left = np.array([swing.left for swing in self._swings])
        swing = self._swings[row[at]]
        totals = before @ left + np.array(swing.highest)
        return tuple(int(each) for each in totals), swing.where, self.owners[at]


def device_bytes(totals: Sequence[int]) -> int:
    return sum(totals) - totals[HOST]
