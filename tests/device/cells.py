"""What ranks on the device `late` do in tests of it: train a cell of the gate, right or with a mistake planted."""

from __future__ import annotations

from tests.device.mistakes import Mistake, planted
from tests.laws.gate.laws import judge


def judged(cell: object, folder: str) -> dict[str, str]:
    """What does not hold, by law."""
    said = judge(cell, folder)  # type: ignore[arg-type]
    return {**said.broken, **({"refused": said.refused} if said.refused else {})}


def mistaken(mistake: Mistake, folder: str) -> dict[str, str]:
    """The same with the mistake planted. An error is a way to see it too, where no other rank waits for this one."""
    with planted(mistake):
        try:
            return judged(mistake.cell, folder)
        except Exception as error:  # a number that came out wrong may be a count
            if mistake.cell.spec.world_size > 1:
                raise
            return {"raised": str(error)[:500]}
