"""Routing replay (router replay, R2, R3): experts that routers chose in one forward, recorded and used again in another.

Of a policy with experts, pi and pi_old may choose other experts for the same token, and their ratio jumps. Replayed choices
have the weights that the present router gives them, so gradients reach it as ever.
Dims: B rows, T tokens, R routers of the whole model in its order, K experts that a token chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from meshkit.core import _torch
from meshkit.core.noting import being_read
from meshkit.errors import DataError, PlanError

ROUTING = "routing"
"""in a batch: [B, T, R, K] int16, 1 + the number of each expert; 0 is none, and the router chooses itself"""
RoutingReplay = Literal["none", "old", "rollout"]
REPLAYS: tuple[str, ...] = get_args(RoutingReplay)


@dataclass(frozen=True)
class RouterPlace:
    """Where a router's choices are in `ROUTING`. number: of the router, of `routers`. It sees `part` of `parts` of each row.

    foreign: the name of a router of the model that may be handed tokens in another order, or empty.
    """

    number: int
    routers: int
    chosen: int
    part: int
    parts: int
    foreign: str

    def own(self, routing_BTRK: Tensor, rows: int, tokens: int) -> Tensor:
        """[B, t, K], of what this rank's router sees."""
        there, wanted = tuple(routing_BTRK.shape), (rows, tokens * self.parts, self.routers, self.chosen)
        if there != wanted:
            raise DataError(
                f"routing replay: the batch's {ROUTING!r} is {list(there)}, but the model's routers want {list(wanted)} "
                "([rows, tokens, routers, choices]). Record it with this model, by routed_values."
            )
        return routing_BTRK[:, self.part * tokens : (self.part + 1) * tokens, self.number]

    def empty(self, rows: int, tokens: int) -> Tensor:
        """`ROUTING` without choices."""
        return torch.zeros(rows, tokens, self.routers, self.chosen, dtype=torch.int16)


# Context variables, since a router is deep inside of a model's forward; recompute runs in a copy of the forward's context.
_replayed: ContextVar[Tensor | None] = ContextVar("choices that routers use", default=None)
_recorded: ContextVar[dict[int, Tensor] | None] = ContextVar(
    "choices of a forward, by the router's number", default=None
)


def place_routers(model: nn.Module, full: nn.Module, *, part: int, parts: int) -> None:
    """Tell each router its `RouterPlace`, in place. full: the model as it was. part, parts: of the tokens of a row."""
    routers: dict[str, Any] = {name: child for name, child in model.named_modules() if hasattr(child, "routing_place")}
    foreign = next((name for name in routers if not has_known_place(full, name)), "")
    for number, router in enumerate(routers.values()):
        router.replay = None
        router.routing_place = RouterPlace(number, len(routers), router.config.chosen, part, parts, foreign)


def has_known_place(model: nn.Module, router: str) -> bool:
    """Whether the router is given [rows, tokens] as the model is: by code of this library alone, and no hook is anywhere."""
    around = [router[:end] for end, letter in enumerate(router) if letter == "."]
    ours = all(
        isinstance(module, nn.ModuleList) or type(module).__module__.startswith("meshkit.models.")
        for module in map(model.get_submodule, ("", *around, router))
    )
    return ours and not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def open_routers(model: nn.Module) -> RouterPlace:
    """Let routers of a parallelized model record and replay, in place; the place of any of them.

    Raises: PlanError for a model without routers of `meshkit.models`, and for one whose routers' tokens are not known.
    """
    routers: list[Any] = [child for child in model.modules() if getattr(child, "routing_place", None) is not None]
    if not routers:
        raise PlanError(
            "routing replay: the model has no router of meshkit.models, after mk.parallelize, whose choices could be "
            "recorded. Leave it away (--routing-replay none): of dense models, and of experts in transformers' own code."
        )
    place: RouterPlace = routers[0].routing_place
    if place.foreign:
        raise PlanError(
            f"routing replay: the router {place.foreign!r} is called by your own code or beside hooks, in an order of tokens "
            "that is not known. Use a model of meshkit.models, or leave it away (--routing-replay none)."
        )
    if any(router.routing_place.chosen != place.chosen for router in routers):
        raise PlanError(
            "routing replay: the routers choose different numbers of experts, and a batch has one for all. Leave it away "
            "(--routing-replay none)."
        )
    for router in routers:
        if router.replay is None:  # only now: in a compiled block it is a graph break
            router.replay = torch.compiler.disable(partial(_chosen, router.routing_place))
    return place


@contextmanager
def replaying(model: nn.Module, routing_BTRK: Tensor | None) -> Iterator[None]:
    """Inside, routers use these choices, also where recompute runs a block again; without any they choose themselves.

    model: of `parallelize`, or what a loss is given for it. Counts, and so router biases, are of the experts that are used;
    the balance loss is of those that the router would choose, for it is what is taught.
    Raises: PlanError, as `open_routers`; DataError, in the forward, for choices of other routers or tokens.
    """
    if routing_BTRK is not None:
        open_routers(model)
    token = _replayed.set(routing_BTRK)
    try:
        yield
    finally:
        _replayed.reset(token)


@contextmanager
def recording() -> Iterator[dict[int, Tensor]]:
    """Collects the choices that routers use inside, by the router's number: [B, t, K] int16, as in `ROUTING`.

    Raises: PlanError, in the forward, for a router that is called twice.
    """
    recorded = dict[int, Tensor]()
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


def _chosen(place: RouterPlace, own_BTK: Tensor) -> Tensor:
    """The experts that a router uses, given its own choice."""
    given, recorded = _replayed.get(), _recorded.get()
    if being_read() or _torch.is_fake(own_BTK):
        return own_BTK
    used = own_BTK
    if given is not None:
        given_BTK = place.own(given, *own_BTK.shape[:2])
        used = torch.where(given_BTK > 0, given_BTK.long() - 1, own_BTK)
    if recorded is not None:
        if place.number in recorded:
            raise PlanError(
                "routing replay: a router is called twice in one forward, and a token has one choice of each. Leave it away "
                "(--routing-replay none)."
            )
        recorded[place.number] = (used + 1).to(torch.int16)
    return used
