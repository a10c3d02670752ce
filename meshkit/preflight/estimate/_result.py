"""Estimate: the memory estimate of one rank, and its printed form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshkit.cluster import Cluster
from meshkit.mesh import MeshSpec
from meshkit.preflight._format import format_axes, format_bytes, table_lines
from meshkit.preflight.estimate._tracker import GROUPS, HOST, Point

BAR = 40  # characters of the longest bar
NUMBERS = (1, 2)  # columns of tables that are aligned to the right


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of one rank in one optimizer step. `str()` is the printed form.

    most: of each group, the most at any moment. at_peak: of each group when the sum was greatest. activations: by module,
    what its forward keeps for one microbatch. points: the step in time, each moment at which something was allocated.
    measured_bytes: the peak of a real run, where `beside` was given it. in_memory_bytes: of the host, for checkpoints there.
    offloaded_bytes: of activations that wait on the host, or on the disk, at a time, at most.
    reserved_bytes: what the caching allocator holds for these tensors, without the CUDA context and NCCL, see `on`; None for
    kernels of a CPU. outside_bytes: those two, where a cluster was given. traced: how many of the microbatches were run.
    """

    spec: MeshSpec
    coordinate: dict[str, int]
    kernels: str
    most: dict[str, int]
    activations: dict[str, int]
    after_forward: dict[str, int]
    peak: Point
    points: tuple[Point, ...] = field(repr=False)
    took_s: float = 0.0
    measured_bytes: int | None = None
    in_memory_bytes: int = 0
    offloaded_bytes: int = 0
    reserved_bytes: int | None = None
    outside_bytes: int | None = None
    microbatches: int = 1
    traced: int = 1

    @property
    def peak_bytes(self) -> int:
        """The most on the device at any moment of the step."""
        return self.peak.device_bytes

    @property
    def where(self) -> str:
        """The part of the step that ran at the peak."""
        return self.peak.where

    @property
    def at_peak(self) -> dict[str, int]:
        return dict(zip(GROUPS, self.peak.totals, strict=True))

    @property
    def parameter_bytes(self) -> int:
        return self.most["parameters"]

    @property
    def gradient_bytes(self) -> int:
        return self.most["gradients"]

    @property
    def optimizer_bytes(self) -> int:
        return self.most["optimizer state"]

    @property
    def logits_bytes(self) -> int:
        return self.most["logits and loss"]

    @property
    def window_bytes(self) -> int:
        """Gathered parameters and gradients in reduction, each at its most."""
        return self.most["gathered parameters"] + self.most["gradients in reduction"]

    @property
    def host_bytes(self) -> int:
        return self.most["on the host"]

    def beside(self, measured_bytes: int) -> Estimate:
        """The estimate beside the peak that a run measured: `Meter`'s peak_allocated_bytes, CUDA's max_memory_allocated()."""
        return replace(self, measured_bytes=measured_bytes)

    def on(self, cluster: Cluster | str) -> Estimate:
        """With what lies on such a device beside the allocator: its context, and NCCL's buffers of each communicator.

        The communicators of a rank are one of the whole world, one for each axis of several ranks, and with pp one for each
        way to a neighbour. Both numbers are the datasheets', and guesses where these say so.
        """
        machine = cluster if isinstance(cluster, Cluster) else Cluster.read(cluster)
        context = machine.device.context_bytes + communicators(self.spec) * machine.device.communicator_bytes
        return replace(self, outside_bytes=int(context))

    def fits(self, device_bytes: int) -> bool:
        return self.peak_bytes <= device_bytes

    def __str__(self) -> str:
        return "\n".join([*_heading(self), "", *_groups(self), "", *_blocks(self), *_end(self)])


def communicators(spec: MeshSpec) -> int:
    """Of one rank, at most: of the world, of each axis with several ranks, and of each way to a neighbour of pp."""
    axes = {**spec.sizes(), "ep": spec.ep, "etp": spec.etp}
    ways = 0 if spec.pp == 1 else 2 if spec.pp == 2 else 4
    return int(spec.world_size > 1) + sum(size > 1 for size in axes.values()) + ways


def _heading(estimate: Estimate) -> list[str]:
    spec = estimate.spec
    sizes = {**spec.sizes(), "ep": spec.ep, "etp": spec.etp}
    axes = format_axes(sizes, omit=1) or "one device"
    coordinate = format_axes(estimate.coordinate, omit=0) or "0 on every axis"
    return [
        f"{spec.world_size} ranks, {axes}; the rank at {coordinate}",
        f"peak {format_bytes(estimate.peak_bytes)} in the {estimate.where.removeprefix('the ')}",
    ]


def _groups(estimate: Estimate) -> list[str]:
    at_peak, most = estimate.at_peak, estimate.most
    longest = max(1, *at_peak.values())
    rows = [("", "at the peak", "at most", "")]
    for index, group in enumerate(GROUPS):
        if most[group] and index != HOST:
            rows.append((group, format_bytes(at_peak[group]), format_bytes(most[group]), bar(at_peak[group], longest)))
    rows.append(("all on the device", format_bytes(estimate.peak_bytes), "", ""))
    if estimate.reserved_bytes is not None:
        rows.append(("reserved by the allocator", "", format_bytes(estimate.reserved_bytes), ""))
    if estimate.outside_bytes is not None:
        rows.append(("CUDA context, NCCL", "", format_bytes(estimate.outside_bytes), ""))
    if estimate.host_bytes:
        rows.append(("on the host", format_bytes(at_peak["on the host"]), format_bytes(estimate.host_bytes), ""))
    if estimate.offloaded_bytes:
        rows.append(("activations offloaded", "", format_bytes(estimate.offloaded_bytes), ""))
    if estimate.in_memory_bytes:
        rows.append(("checkpoints there", "", format_bytes(estimate.in_memory_bytes), ""))
    if estimate.measured_bytes is not None:
        off = estimate.peak_bytes / estimate.measured_bytes - 1
        rows.append(("measured", format_bytes(estimate.measured_bytes), "", f"the estimate is {off:+.1%} off"))
    return table_lines(rows, right=NUMBERS)


def _blocks(estimate: Estimate) -> list[str]:
    """Modules in a row that keep the same are one line."""
    runs: list[tuple[str, str, int, int]] = []
    for name, size in estimate.activations.items():
        if runs and runs[-1][2] == size:
            runs[-1] = (runs[-1][0], name, size, runs[-1][3] + 1)
        elif size:
            runs.append((name, name, size, 1))
    rows = [("kept for backward by", "each", "all, of one microbatch")]
    for first, last, size, count in runs:
        rows.append((first if count == 1 else f"{first} to {last}", format_bytes(size), format_bytes(size * count)))
    return table_lines(rows, right=NUMBERS) if runs else []


def _end(estimate: Estimate) -> list[str]:
    kernels = {
        "cuda": "RMSNorm and plain attention in bf16 as CUDA's kernels keep them, the rest as CPU's do",
        "cpu": "as CPU's kernels keep them",
    }
    lines = [
        "",
        f"kernels: {kernels[estimate.kernels]}. Not in the peak: workspaces of kernels, NCCL's buffers, fragmentation",
    ]
    if estimate.traced < estimate.microbatches:
        lines.append(f"microbatches: {estimate.traced} of {estimate.microbatches} were run, and more change no peak")
    if estimate.spec.ep * estimate.spec.etp > 1:
        lines.append("experts: as if tokens chose all alike")
    return lines


def bar(size: int, longest: int) -> str:
    eighths = round(8 * BAR * size / longest)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
