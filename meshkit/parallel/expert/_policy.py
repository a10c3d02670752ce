"""How tokens and experts come together, beyond the mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshkit.errors import PlanError
from meshkit.mesh import Mesh
from meshkit.parallel.expert._capacity import Capacity
from meshkit.parallel.expert._dispatch import Dispatcher

MakeDispatcher = Callable[[int, Mesh], Dispatcher]
"""(number of experts, mesh) to what brings tokens to them"""


@dataclass(frozen=True, kw_only=True)
class ExpertPolicy:
    """capacity: each expert takes at most so many tokens; None drops nothing.
    hot: so many experts of a layer, those with most tokens in the last `history` steps, are copied to every rank of ep before
    they are used, and tokens that chose them stay; see `HotExperts`. dispatcher: another way there and back.
    """

    capacity: Capacity | None = None
    hot: int = 0
    history: int = 5
    dispatcher: MakeDispatcher | None = None

    def __post_init__(self) -> None:
        if self.hot < 0 or self.history < 1:
            raise PlanError(
                f"ExpertPolicy: hot={self.hot} experts by the last history={self.history} steps. Use hot of at least 0, and "
                "history of at least 1."
            )
        if self.dispatcher is not None and (self.hot or self.capacity is not None):
            raise PlanError(
                "ExpertPolicy: hot and capacity are of meshkit's own dispatcher; another one has its own way. Leave them "
                "away, or leave dispatcher away."
            )

    def refuse_misfit(self, mesh: Mesh) -> None:
        """Raises: PlanError for hot experts on a mesh that does not share experts whole."""
        if self.hot and (mesh.spec.ep == 1 or mesh.spec.etp > 1):
            raise PlanError(
                f"ExpertPolicy: hot={self.hot} copies experts between ranks of ep that hold them whole, but the mesh has "
                f"ep={mesh.spec.ep} etp={mesh.spec.etp}. Use ep > 1 and etp=1, or hot=0."
            )
