"""A lost host: wait for its repair, keep hot spares, or shrink and go on. Shares of the devices that are held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from math import ceil, exp, lgamma, log

from meshkit.errors import PlanError
from meshkit.preflight.goodput._faults import Faults


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """What is done when a host is lost. share: useful, of the time of all devices that are held, spares too."""

    name: str
    share: float
    note: str


MOST = 1000
"""spare hosts that are tried in any case; more only up to ten times the job"""


def stalled_share(load: float, spares: int) -> float:
    """Share of the time in which more hosts are away than there are spares, so the job waits.

    load: hosts lost in the time of one repair, while the job runs. Erlang's loss formula B(spares + 1, load), which needs
    no assumption on how long single repairs take, only on their mean. Source: Erlang 1917; Sevastyanov 1957.
    """
    return next(islice(_stalled_shares(load), spares, None))


def _stalled_shares(load: float) -> Iterator[float]:
    """Of 0, 1, 2, ... spares."""
    blocked = 1.0
    for servers in count(1):
        blocked = load * blocked / (servers + load * blocked)
        yield blocked


def hosts_lost_per_repair(faults: Faults, ranks: int) -> float:
    return faults.rate_per_s(ranks) * faults.host_lost * 3600.0 * faults.repair_h


def spares(share: float, faults: Faults, ranks: int, hosts: int) -> Alternative:
    """The job with `hosts` spare hosts; with none it waits for each repair. share: the goodput without waiting."""
    return _with_spares(share, faults, ranks, hosts, stalled_share(hosts_lost_per_repair(faults, ranks), hosts))


def _with_spares(share: float, faults: Faults, ranks: int, hosts: int, stalled: float) -> Alternative:
    held = ranks / (ranks + hosts * faults.devices_per_host)
    name = "wait for the repair" if hosts == 0 else f"{hosts} hot spare{'s' if hosts > 1 else ''}"
    return Alternative(
        name=name, share=share * held * (1 - stalled), note=f"waits {stalled:.2%} of the time, {1 - held:.2%} idle"
    )


def best_spares(share: float, faults: Faults, ranks: int) -> Alternative:
    """The number of spare hosts, from 1 up, with the largest share."""
    best = (0.0, 1, 1.0)
    for hosts, stalled in enumerate(_stalled_shares(hosts_lost_per_repair(faults, ranks))):
        useful = (1 - stalled) * ranks / (ranks + hosts * faults.devices_per_host)
        if hosts and useful > best[0]:
            best = (useful, hosts, stalled)
        # While the job mostly waits one spare more may lose a little, and many more win.
        elif hosts > 1 and (stalled < 0.5 or hosts * faults.devices_per_host > ranks):
            break
        # Where hosts get lost faster than they come back each spare wins, and no number is enough.
        if hosts > MOST and hosts * faults.devices_per_host > 10 * ranks:
            break
    return _with_spares(share, faults, ranks, *best[1:])


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
    left = 0.0
    for away in range(ceil(ranks / faults.devices_per_host)):
        chance = exp(away * log(load) - load - lgamma(away + 1)) if load else float(away == 0)
        left += chance * ((ranks - away * faults.devices_per_host) // multiple * multiple) / ranks
    returns_per_s = faults.rate_per_s(ranks) * faults.host_lost
    return Alternative(
        name=f"shrink by {multiple}",
        share=share * left * exp(-returns_per_s * restart_s),
        note=f"{left:.2%} of the ranks work",
    )
