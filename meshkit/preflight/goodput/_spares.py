"""A lost host: wait for its repair, keep hot spares, or shrink and go on. Shares of the devices that are held."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from meshkit.errors import PlanError
from meshkit.preflight.goodput._faults import Faults


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What is done when a host is lost. share: useful, of the time of all devices that are held, spares too."""

    name: str
    share: float
    note: str


def stalled_share(load: float, spares: int) -> float:
    """Share of the time in which more hosts are away than there are spares, so the job waits.

    load: hosts lost in the time of one repair, while the job runs. Erlang's loss formula B(spares + 1, load), which needs
    no assumption on how long single repairs take, only on their mean. Source: Erlang 1917; Sevastyanov 1957.
    """
    blocked = 1.0
    for servers in range(1, spares + 2):
        blocked = load * blocked / (servers + load * blocked)
    return blocked


def hosts_lost_per_repair(faults: Faults, ranks: int) -> float:
    return faults.rate_per_s(ranks) * faults.host_lost * 3600.0 * faults.repair_h


def spares(share: float, faults: Faults, ranks: int, count: int) -> Alternative:
    """The job with `count` spare hosts; with none it waits for each repair. share: the goodput without waiting."""
    held = ranks / (ranks + count * faults.devices_per_host)
    stalled = stalled_share(hosts_lost_per_repair(faults, ranks), count)
    name = "wait for the repair" if count == 0 else f"{count} hot spare{'s' if count > 1 else ''}"
    return Alternative(
        name=name, share=share * held * (1 - stalled), note=f"waits {stalled:.2%} of the time, {1 - held:.2%} idle"
    )


def best_spares(share: float, faults: Faults, ranks: int) -> Alternative:
    """The number of spare hosts, from 1 up, with the largest share."""
    best = spares(share, faults, ranks, 1)
    for count in range(2, 2 + ranks // faults.devices_per_host):
        more = spares(share, faults, ranks, count)
        if more.share <= best.share and stalled_share(hosts_lost_per_repair(faults, ranks), count - 1) < 0.5:
            break
        best = max(best, more, key=lambda alternative: alternative.share)
    return best


def shrink(share: float, faults: Faults, ranks: int, *, multiple: int, restart_s: float) -> Alternative:
    """Go on with the largest multiple of ranks that is left, and with all of them when a host comes back.

    The batch stays, so a step takes longer by the ranks that are missing. Each host that comes back is one more restart,
    without lost work. Hosts away at a time are Poisson's, as in a queue with a server for each (M/G/∞).
    Raises: PlanError if the ranks are no multiple.
    """
    if multiple < 1 or ranks % multiple:
        raise PlanError(
            f"multiple={multiple}: {ranks} ranks are no multiple of it. Give the ranks of one copy of the model."
        )
    load = hosts_lost_per_repair(faults, ranks)
    left, away, chance = 0.0, 0, exp(-load)
    while (usable := ranks - away * faults.devices_per_host) > 0:
        left += chance * (usable // multiple * multiple) / ranks
        away += 1
        chance *= load / away
    returns_per_s = faults.rate_per_s(ranks) * faults.host_lost
    return Alternative(
        name=f"shrink by {multiple}",
        share=share * left * exp(-returns_per_s * restart_s),
        note=f"{left:.2%} of the ranks work",
    )
