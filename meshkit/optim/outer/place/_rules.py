"""What a meeting place is told: how many replicas, a quorum, a grace period, and how long an exchange may take."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.errors import PlanError

LEAST_S, MOST_S = 1e-3, 1e7


@dataclass(frozen=True, kw_only=True)
class MeetingRules:
    """replicas: the most that there may be, each with a slot, which says what part of the data it reads.

    quorum: the fewest that a meeting has, with those who come to it. grace_s: how long those who are there wait for the
    others, and how long one may say nothing before it counts as gone. exchange_s: how long an exchange, or handing a state
    on, may take. patience_s: how long those who are there wait for a quorum, before they end.
    """

    replicas: int
    quorum: int = 1
    grace_s: float = 30.0
    exchange_s: float = 600.0
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        if self.replicas < 1 or not 1 <= self.quorum <= self.replicas:
            raise PlanError(
                f"meeting-place --replicas {self.replicas} --quorum {self.quorum}: a quorum is from 1 to the number of "
                "replicas."
            )
        for name in ("grace_s", "exchange_s", "patience_s"):
            if not LEAST_S <= (value := getattr(self, name)) <= MOST_S:
                raise PlanError(
                    f"meeting-place --{name.removesuffix('_s')} {value}: give seconds from {LEAST_S} to {MOST_S:.0f}."
                )

    @property
    def beat_s(self) -> float:
        """Between two signs of life, of which some may come late."""
        return min(1.0, self.grace_s / 5)
