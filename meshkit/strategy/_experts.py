"""Choices of expert parallelism: capacity factor and token dropping, copies of hot experts, the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from meshkit.errors import PlanError

DEFAULT_HISTORY = 5  # steps
DEFAULT_TARGET = 1.05  # of the mean

MakeDispatcher = Callable[[int, Any], Any]
"""(number of experts, DeviceMesh of ep x etp) to a `meshkit.parallel.expert.Dispatcher`, which brings tokens to them"""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Each expert takes at most factor * N * K / E of a rank's (token, choice) pairs, rounded up; the rest are dropped.

    N tokens of the rank, K choices of a token, E experts. drop: "probability" keeps the pairs with the largest weights,
    "position" the first tokens. least: "angle" lets no limit be below what each expert needs by the angle between its routing
    vector and the rank's tokens, see `meshkit.moe.routing.least_capacity`. Each rank drops among its own tokens, so the
    result depends on the mesh.
    Source: Fedus et al. 2022, section 2.2; dropping of own tokens: Liu et al. 2025 (parallel folding).
    """

    factor: float
    drop: Literal["probability", "position"] = "probability"
    least: Literal["none", "angle"] = "none"

    def __post_init__(self) -> None:
        if self.least not in ("none", "angle"):
            raise PlanError(f"Capacity: least={self.least!r} is not known. Use none or angle.")
        if not self.factor > 0:
            raise PlanError(
                f"Capacity: factor={self.factor} leaves no room. 1.0 is the even share; leave capacity away for no limit."
            )
        if self.drop not in ("probability", "position"):
            raise PlanError(f"Capacity: drop={self.drop!r} is not known. Use probability or position.")


@dataclass(frozen=True, kw_only=True)
class ExpertPolicy:
    """How tokens get to their experts, beyond what the mesh says.

    capacity: the limit of tokens per expert; None drops nothing. copies: so many busy experts of a layer, at most, are copied
    to a rank of ep while they compute, and share the tokens; chosen after each step by the tokens of the last `history`,
    until the busiest rank is expected to have `target` times the mean; see `HotExperts`. expected: rows of each expert of a
    layer, by which copies are chosen until a step has been counted, and in all that is said of a run before it runs. owners:
    "load" lets `meshkit.moving.move_experts` give experts to other ranks between steps, up to `spare` more than its even
    share to one. max_rows: pad exchanges to so many rows, so that the host waits for no counts: each rank sends each rank of
    ep as many in every call, see `PaddedAllToAll`; None sends as many as there are. dispatcher: another one instead of
    meshkit's.
    """

    capacity: Capacity | None = None
    copies: int = 0
    target: float = DEFAULT_TARGET
    history: int = DEFAULT_HISTORY
    owners: Literal["fixed", "load"] = "fixed"
    spare: int = 0
    expected: tuple[int, ...] | None = None
    max_rows: int | None = None
    dispatcher: MakeDispatcher | None = None

    def __post_init__(self) -> None:
        if self.copies < 0 or self.history < 1 or self.target < 1:
            raise PlanError(
                f"ExpertPolicy: copies={self.copies} by the last history={self.history} steps, up to target={self.target} "
                "of the mean. Use copies of at least 0, history and target of at least 1."
            )
        if self.owners not in ("fixed", "load"):
            raise PlanError(f"ExpertPolicy: owners={self.owners!r} is not known. Use fixed or load.")
        if self.target != DEFAULT_TARGET and not self.copies:
            raise PlanError(
                f"ExpertPolicy: target={self.target} is when copies are enough, but copies=0 makes none. Give copies, or "
                "leave target away."
            )
        if self.expected is not None and (not self.copies or min(self.expected, default=-1) < 0):
            raise PlanError(
                f"ExpertPolicy: expected={self.expected} with copies={self.copies}: these are rows of each expert, by which "
                "copies are chosen. Give numbers of at least 0, and copies; or leave expected away."
            )
        if self.history != DEFAULT_HISTORY and not self.follows_load:
            raise PlanError(
                f"ExpertPolicy: history={self.history} is how busy experts are found, but copies=0 and owners='fixed' look "
                "for none. Give copies or owners, or leave history away."
            )
        if self.spare < 0 or (self.spare and self.owners == "fixed"):
            raise PlanError(
                f"ExpertPolicy: spare={self.spare} is how many experts a rank may own beyond its share, with "
                f"owners={self.owners!r}. Use spare of at least 0, and with owners='load'."
            )
        if self.max_rows is not None and self.max_rows < 1:
            raise PlanError(
                f"ExpertPolicy: max_rows={self.max_rows} leaves no room. Use the most rows that a rank may have for the "
                "experts of another, or leave max_rows away."
            )
        if self.max_rows is not None and self.follows_load:
            raise PlanError(
                f"ExpertPolicy: copies={self.copies} owners={self.owners!r} read on the host where tokens go, which "
                f"max_rows={self.max_rows} is there to avoid. Leave one of them away."
            )
        if self.dispatcher is not None and (
            self.follows_load or self.capacity is not None or self.max_rows is not None
        ):
            raise PlanError(
                "ExpertPolicy: copies, owners, capacity and max_rows are of meshkit's own dispatcher; another one has its "
                "own way. Leave them away, or leave dispatcher away."
            )

    @property
    def follows_load(self) -> bool:
        return self.copies > 0 or self.owners == "load"

    def refuse_other_number(self, name: str, experts: int) -> None:
        """Raises: PlanError for rows that are expected of more or fewer experts than the module has."""
        if self.expected is not None and len(self.expected) != experts:
            raise PlanError(
                f"ExpertPolicy: expected has rows of {len(self.expected)} experts, but {name!r} has {experts}. Give a number "
                "for each."
            )

    def refuse_misfit(self, *, ep: int, etp: int) -> None:
        """Raises: PlanError for experts that follow their load on one rank of ep, and for padding of no exchange."""
        if self.max_rows is not None and ep * etp == 1:
            raise PlanError(
                f"ExpertPolicy: max_rows={self.max_rows} pads what ranks of ep and etp exchange, but the mesh has ep=1 "
                "etp=1. Use ep > 1 or etp > 1, or leave max_rows away."
            )
        if self.follows_load and ep == 1:
            raise PlanError(
                f"ExpertPolicy: copies={self.copies} owners={self.owners!r} are about which ranks of ep compute an expert, "
                f"but the mesh has ep={ep} etp={etp}. Use ep > 1, or leave them away."
            )
