"""Choices of context parallelism: ring, all-gather, Ulysses; zigzag and other load balancing of tokens over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshkit.errors import PlanError
from meshkit.plan.match import listed

Scheme = Literal["auto", "ring", "all_gather", "group_cast", "ulysses"]
Balance = Literal["contiguous", "zigzag", "per_document", "locality"]


@dataclass(frozen=True, kw_only=True)
class ContextPolicy:
    """How the tokens of a sequence are split over `cp`, and how ranks exchange keys and values for attention.

    scheme: "ring" passes keys and values round the ranks; "all_gather" gathers them; "group_cast" sends each rank only the
    keys that its queries see; "ulysses" exchanges tokens for heads (all-to-all); "auto" takes the scheme that sends the
    fewest bytes for the mask. ulysses: with ring or group_cast, the number of consecutive ranks that exchange tokens for
    heads (2-D); with None "auto" chooses. balance: the assignment of tokens to ranks: "contiguous", "zigzag", "per_document",
    "locality", or "auto". slack: by how much the busiest rank may exceed the mean work in order to send less: 0.1 is 10 %.
    kv_heads_per_gather: the number of key/value heads that all_gather sends at a time.
    whole: names of tensors of a batch that have no tokens, such as images: every rank of cp gets them whole.
    """

    scheme: Scheme = "auto"
    balance: Literal["auto", Balance] = "auto"
    ulysses: int | None = None
    slack: float = 0.0
    kv_heads_per_gather: int = 1
    whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", listed(self.whole, where="ContextPolicy", argument="whole"))
        if self.scheme not in get_args(Scheme):
            raise PlanError(
                f"context scheme {self.scheme!r} does not exist. Choose one of {', '.join(get_args(Scheme))}."
            )
        if self.balance != "auto" and self.balance not in get_args(Balance):
            raise PlanError(
                f"context balance {self.balance!r} does not exist. Choose one of auto, {', '.join(get_args(Balance))}."
            )
        # Ulysses alone splits heads over all of cp, and all_gather splits none: neither leaves a second dimension to choose.
        if self.ulysses is not None and self.scheme in ("all_gather", "ulysses"):
            raise PlanError(
                f"context scheme {self.scheme!r} with ulysses={self.ulysses}: only ring and group_cast have a second "
                'dimension of Ulysses. Leave ulysses away, or use scheme="ring".'
            )
        if not 0 <= self.slack <= 1:
            raise PlanError(
                f"context slack={self.slack} is outside of 0 to 1: 0.1 lets a rank work 10 % more than the mean."
            )
        if self.kv_heads_per_gather < 1:
            raise PlanError(
                f"context kv_heads_per_gather={self.kv_heads_per_gather}: at least 1 head is sent at a time."
            )

        # "auto" may take all_gather, and may compare assignments by slack, so there both are honest wishes.
        if self.kv_heads_per_gather > 1 and self.scheme not in ("auto", "all_gather"):
            raise PlanError(
                f"context kv_heads_per_gather={self.kv_heads_per_gather} is of the scheme all_gather, but this one is "
                f"{self.scheme!r}. Leave it away, or use scheme='all_gather'."
            )
        if self.slack and self.balance not in ("auto", "locality"):
            raise PlanError(
                f"context slack={self.slack} trades balance of work for bytes, but balance={self.balance!r} does not look at "
                "it. Leave slack away, or use balance='locality'."
            )

    def refuse_misfit(self, ranks: int) -> None:
        """Raises: PlanError if `ulysses` does not divide the ranks of cp."""
        if self.ulysses is not None and (self.ulysses < 1 or ranks % self.ulysses):
            divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise PlanError(
                f"context ulysses={self.ulysses} does not divide cp={ranks}. Choose one of {divisors}, or another cp."
            )
