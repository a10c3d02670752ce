"""Choices of expert parallelism: capacity factor and token dropping, copies of hot experts, the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meshkit.errors import PlanError

DEFAULT_HISTORY = 5  # steps

MakeDispatcher = Callable[[int, Any], Any]
"""(number of experts, DeviceMesh of ep x etp) to a `meshkit.parallel.expert.Dispatcher`, which brings tokens to them"""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Each expert takes at most factor * N * K / E of a rank's (token, choice) pairs, rounded up; the rest are dropped.

    N tokens of the rank, K choices of a token, E experts. drop: "probability" keeps the pairs with the largest weights,
    "position" the first tokens. Each rank drops among its own tokens, so the result depends on the mesh.
    Source: Fedus et al. 2022, section 2.2; dropping of own tokens: Liu et al. 2025 (parallel folding).
    """

    factor: float
    drop: Literal["probability", "position"] = "probability"

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise PlanError(
                f"Capacity: factor={self.factor} leaves no room. 1.0 is the even share; leave capacity away for no limit."
            )
        if self.drop not in ("probability", "position"):
            raise PlanError(f"Capacity: drop={self.drop!r} is not known. Use probability or position.")


@dataclass(frozen=True, kw_only=True)
class ExpertPolicy:
    """How tokens get to their experts, beyond what the mesh says.

    capacity: the limit of tokens per expert; None drops nothing. hot: the number of experts of a layer that are copied to
    every rank of ep, so that tokens that chose them are not sent: those with most tokens in the last `history` steps; see
    `HotExperts`. max_rows: pad exchanges to so many rows, so that the host waits for no counts: each rank sends each rank of
    ep as many in every call, see `PaddedAllToAll`; None sends as many as there are. dispatcher: another one instead of
    meshkit's.
    """

    capacity: Capacity | None = None
    hot: int = 0
    history: int = DEFAULT_HISTORY
    max_rows: int | None = None
    dispatcher: MakeDispatcher | None = None

    def __post_init__(self) -> None:
        if self.hot < 0 or self.history < 1:
            raise PlanError(
                f"ExpertPolicy: hot={self.hot} experts by the last history={self.history} steps. Use hot of at least 0, and "
                "history of at least 1."
            )
        if self.history != DEFAULT_HISTORY and not self.hot:
            raise PlanError(
                f"ExpertPolicy: history={self.history} is how hot experts are found, but hot=0 copies none. Give hot, or "
                "leave history away."
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise PlanError(
                f"ExpertPolicy: max_rows={self.max_rows} leaves no room. Use the most rows that a rank may have for the "
                "experts of another, or leave max_rows away."
            )
        if self.max_rows is not None and self.hot:
            raise PlanError(
                f"ExpertPolicy: hot={self.hot} reads on the host where tokens go, which max_rows={self.max_rows} is there to "
                "avoid. Leave one of them away."
            )
        if self.dispatcher is not None and (self.hot or self.capacity is not None or self.max_rows is not None):
            raise PlanError(
                "ExpertPolicy: hot, capacity and max_rows are of meshkit's own dispatcher; another one has its own way. "
                "Leave them away, or leave dispatcher away."
            )

    def refuse_misfit(self, *, ep: int, etp: int) -> None:
        """Raises: PlanError for hot experts on a mesh that does not share experts whole, and for padding of no exchange."""
        if self.max_rows is not None and ep * etp == 1:
            raise PlanError(
                f"ExpertPolicy: max_rows={self.max_rows} pads what ranks of ep and etp exchange, but the mesh has ep=1 "
                "etp=1. Use ep > 1 or etp > 1, or leave max_rows away."
            )
        # With etp no rank holds an expert whole that it could copy to others.
        if self.hot and (ep == 1 or etp > 1):
            raise PlanError(
                f"ExpertPolicy: hot={self.hot} copies experts between ranks of ep that hold them whole, but the mesh has "
                f"ep={ep} etp={etp}. Use ep > 1 and etp=1, or hot=0."
            )
