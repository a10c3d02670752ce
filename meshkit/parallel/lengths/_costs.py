"""Cost model of a piece of a document on a rank: pairs of attention, tokens, and the keys that come from other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class LengthCosts:
    """Seconds of one layer on one rank, forward and backward; what is sent is counted as not hidden behind anything.

    pair_s: of a visible (query, key) pair. token_s: of a token in everything but attention. key_bytes: what is sent for a key
    that a rank needs of another: key and value in forward and backward, and their gradients. node: consecutive ranks that
    reach each other at near_bytes_per_s; the others are reached at far_bytes_per_s.
    """

    pair_s: float
    token_s: float
    key_bytes: float = 0.0
    near_bytes_per_s: float = float("inf")
    far_bytes_per_s: float = float("inf")
    node: int = 8

    def __post_init__(self) -> None:
        if self.pair_s < 0 or self.token_s < 0 or self.pair_s + self.token_s == 0 or self.key_bytes < 0:
            raise PlanError(
                f"LengthCosts(pair_s={self.pair_s!r}, token_s={self.token_s!r}, key_bytes={self.key_bytes!r}): costs are at "
                "least 0, and a pair or a token takes some time."
            )
        if not self.near_bytes_per_s > 0 or not self.far_bytes_per_s > 0 or self.node < 1:
            raise PlanError(
                f"LengthCosts(near_bytes_per_s={self.near_bytes_per_s!r}, far_bytes_per_s={self.far_bytes_per_s!r}, "
                f"node={self.node!r}): rates are more than 0, and a node has at least 1 rank."
            )

    @property
    def near_s(self) -> float:
        """Seconds that a key from a rank of the same node takes."""
        return self.key_bytes / self.near_bytes_per_s

    @property
    def far_s(self) -> float:
        """Seconds that a key from another node takes."""
        return self.key_bytes / self.far_bytes_per_s
