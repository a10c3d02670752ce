"""Forecast: the result of `forecast`, and its printed form."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from meshkit.cluster import Cluster
from meshkit.preflight._format import format_axes, table_lines
from meshkit.preflight.forecast._beside import COMPUTING, Told
from meshkit.preflight.forecast._price import KERNELS, Ledger, Priced, Prices, price
from meshkit.preflight.forecast._profile import StepProfile

BAR = 30
_COMPUTING = (*KERNELS, "launch", "host", "jitter", "shared cores", "offload")
LEVELS = {
    "datasheet": "from a datasheet; docs/accuracy.md has the errors on published runs",
    "measured": "from measure-cluster on this machine; docs/accuracy.md has the errors on runs there",
    "traced": "from the trace of a run",
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds of one optimizer step, and where they go. `str()` is the printed form. measured_s: of a real step, by `beside`.

    profile: the step without a cluster, which `on` prices on another. cluster: on which this is.
    """

    profile: StepProfile
    cluster: Cluster
    priced: Priced
    measured_s: float | None = None

    @property
    def seconds(self) -> float:
        return self.priced.seconds

    @property
    def ledger(self) -> Ledger:
        """What the seconds go to; they sum to `seconds`. An axis is what is seen of its messages, beside no computing."""
        return self.priced.ledger

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job."""
        return self.profile.tokens / self.seconds

    @property
    def ranks(self) -> int:
        return self.profile.spec.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: recompute is not counted, and attention's whole square is."""
        peak = self.cluster.device.peak_flops_per_s(self.profile.dtype)
        return self.profile.flops / (self.seconds * peak * self.ranks)

    @property
    def joules(self) -> float | None:
        """Of the step on all devices, at their fastest clock; None for a cluster that says no watts."""
        device = self.cluster.device
        return self.ranks * device.joules(self.seconds, self.priced.busy_s) if device.power else None

    @property
    def unpriced(self) -> tuple[str, ...]:
        """What the step does besides, and no number here counts."""
        offload, host = self.profile.offload, self.cluster.host
        of_disk = offload is not None and offload.to == "disk" and not host.disk_bytes_per_s
        disk = ("the disk, of which the cluster says no host.disk_bytes_per_s",) if of_disk else ()
        return (*self.profile.unpriced, *disk)

    @property
    def told(self) -> Told:
        """As a rank measures a step, and as a file keeps it."""
        by_axis: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self.ledger.items():
            if name != "step":
                by_axis[COMPUTING if name in _COMPUTING else "pp" if name == "bubble" else name] += seconds
        prices = Prices(self.cluster, self.profile.spec)
        for call in self.profile.once:
            if call.phase == "step":
                by_axis[call.axis] += prices.call_s(call)
        device, level = self.cluster.device.name, self.cluster.level
        return Told(seconds=self.seconds, by_axis=dict(by_axis), device=device, level=level)

    def on(self, cluster: Cluster) -> Forecast:
        """The same step on another cluster; nothing is traced again."""
        return Forecast(profile=self.profile, cluster=cluster, priced=price(self.profile, cluster))

    def beside(self, measured_s: float) -> Forecast:
        """The forecast beside the seconds of a real step."""
        return replace(self, measured_s=measured_s)

    def __str__(self) -> str:
        spec = self.profile.spec
        axes = format_axes({**spec.sizes(), "ep": spec.ep, "etp": spec.etp}, omit=1) or "one device"
        parts = "1 microbatch" if self.profile.microbatches == 1 else f"{self.profile.microbatches} microbatches"
        longest = max(self.ledger.values())
        rows = [
            (name, f"{seconds * 1e3:,.2f} ms", f"{seconds / self.seconds:.1%}", "█" * round(BAR * seconds / longest))
            for name, seconds in sorted(self.ledger.items(), key=lambda item: -item[1])
        ]
        joules = "" if self.joules is None else f", {self.joules:,.4g} J"
        lines = [
            f"{self.ranks} ranks, {axes}, {parts}, on {self.cluster.device.name}",
            f"step {self.seconds:.4g} s, {self.tokens_per_s:,.0f} tokens/s, MFU {self.mfu:.1%}{joules}",
            "",
            *table_lines(rows, right=(1, 2)),
            "",
            f"{self.cluster.level}: {LEVELS[self.cluster.level]}",
        ]
        if self.unpriced:
            lines.append(f"not priced: {', '.join(self.unpriced)}; the step takes longer")
        if self.measured_s is not None:
            off = self.seconds / self.measured_s - 1
            lines.append(f"measured {self.measured_s:.4g} s: the forecast is {off:+.1%} off")
        return "\n".join(lines)
