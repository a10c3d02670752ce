"""Statistics of activation offload for one step, for logs."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class OffloadStep:
    """One rank's numbers of one step. waited_s: by compute or by the host, for copies, files or room."""

    storages: int = 0  # moved, each once
    tensors: int = 0  # that lie in them
    stored_bytes: int = 0
    fetched_bytes: int = 0  # from the host or the disk
    forwarded_bytes: int = 0  # needed again before they had left
    peak_bytes: int = 0  # of the tier, over all steps so far
    waited_s: float = 0.0

    def scalars(self) -> dict[str, float]:
        return {
            "offload/stored_mib": self.stored_bytes / MIB,
            "offload/fetched_mib": self.fetched_bytes / MIB,
            "offload/peak_mib": self.peak_bytes / MIB,
            "offload/waited_s": self.waited_s,
        }

    def __str__(self) -> str:
        return (
            f"{self.tensors} tensors in {self.storages} storages; out {self.stored_bytes / MIB:,.1f} MiB, back "
            f"{self.fetched_bytes / MIB:,.1f} MiB, {self.forwarded_bytes / MIB:,.1f} MiB needed before they had left; at "
            f"most {self.peak_bytes / MIB:,.1f} MiB away; waited {self.waited_s:.3f} s"
        )
