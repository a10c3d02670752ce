"""What a world of ranks says of a cell, in one text; empty where every law holds."""

from __future__ import annotations

import re
import tempfile

from tests.laws.gate.cell import Cell
from tests.laws.gate.laws import judge, order
from tests.world import RankError, pool

SECONDS = 300.0  # eight ranks on two cores that others use too took 167 s


def verdict(cell: Cell) -> str:
    """Why the gate is closed to the cell, "" if it is open: all laws hold, or the plan is refused as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            told = pool(cell.spec.world_size).run(judge, cell, f"{folder}/checkpoints", timeout_s=SECONDS)
        except RankError as error:
            return str(error)
    refused, wanted = {rank.refused for rank in told}, cell.refusals()
    if len(refused) > 1:
        return f"ranks refuse differently: {sorted(refused)}"
    text = refused.pop()
    if bool(text) != bool(wanted):
        return f"refused: {text}" if text else f"not refused: {wanted[0].one} with {wanted[0].other}"
    if text and not any(re.search(refusal.match, text) for refusal in wanted):
        return f"refused otherwise: {text}"
    by_rank = [f"rank {at}, {law}: {what}" for at, rank in enumerate(told) for law, what in rank.broken.items()]
    of_all = [f"{law}: {what}" for law, what in order([rank.events for rank in told]).items()]
    return "\n".join(by_rank + of_all)
