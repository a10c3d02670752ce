"""Tracing the published rows: a profile of each step, kept in a folder, since tracing takes seconds and pricing none."""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
from pathlib import Path

from benchmarks.accuracy.rows import Row, batch_of, program_of, read_rows, strategy_of
from meshkit.errors import MeshkitError
from meshkit.preflight.forecast import Profiles, StepProfile, profile_step
from meshkit.resolve import resolve

KEPT = Path("build/accuracy")
VERSION = "3"  # of profiles: raised where what is traced, or refused, changes


def profile_of(row: Row, profiles: Profiles, *, kept: bool = False) -> StepProfile | str | None:
    """The profile, or why there is none. kept: None where it is not in the folder."""
    name = hashlib.sha256(f"{VERSION} {sorted(row.fields.items())}".encode()).hexdigest()[:16]
    path = KEPT / f"{name}.pickle"
    if path.is_file():
        found: StepProfile | str = pickle.loads(path.read_bytes())  # written by this very program
        return found
    if kept:
        return None
    try:
        strategy = strategy_of(row)
        resolved = resolve(program_of(row), strategy, strategy.mesh_for(), device_type="cuda")
        found = profile_step(resolved, batch_of(row), microbatches=strategy.microbatches or 1, profiles=profiles)
    except MeshkitError as error:
        found = f"{type(error).__name__}: {error}"
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(found))
    return found


def main() -> None:
    rows = sorted(read_rows(), key=lambda row: (row.fields["model"], row.fields["tp"], row.fields["micro_batch"]))
    wanted = sys.argv[1:] or list(dict.fromkeys(row.source for row in rows))
    rows = [row for source in wanted for row in rows if row.source == source]
    profiles, last = Profiles(), None
    for number, row in enumerate(rows):
        if (row.fields["model"], row.fields["layers"]) != last:
            profiles, last = Profiles(), (row.fields["model"], row.fields["layers"])
        began = time.monotonic()
        found = profile_of(row, profiles)
        text = found if isinstance(found, str) else "ok"
        print(f"{number}/{len(rows)} {time.monotonic() - began:.1f} s {row.source} {row.label}: {text}", flush=True)


if __name__ == "__main__":
    main()
