"""Choices of context parallelism: ring, all-gather, Ulysses; zigzag and other load balancing of tokens over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from meshkit.errors import PlanError
from meshkit.plan.match import listed
from meshkit.strategy._memory import Rates
from meshkit.strategy._sparse import Sparse

Scheme = Literal["auto", "ring", "double_ring", "all_gather", "group_cast", "ulysses"]
Balance = Literal["contiguous", "zigzag", "per_document", "locality"]
Rule = Literal["by_length", "flexsp", "bytescale", "zeppelin"]


@dataclass(frozen=True, kw_only=True)
class ContextPolicy:
    """How the tokens of a sequence are split over `cp`, and how ranks exchange keys and values for attention.

    scheme: "ring" passes keys and values round the ranks; "double_ring" does so inside of nodes and, at the same time,
    between ranks of one number in all nodes, so that all network cards share what crosses; "all_gather" gathers them;
    "group_cast" sends each rank only the keys that its queries see; "ulysses" exchanges tokens for heads (all-to-all); "auto"
    takes the scheme that sends the fewest bytes for the mask. ulysses: with rings or group_cast, the number of consecutive
    ranks that exchange tokens for heads (2-D); with None "auto" chooses. balance: the assignment of tokens to ranks:
    "contiguous", "zigzag", "per_document", "locality", or "auto". slack: by how much the busiest rank may exceed the mean
    work in order to send less: 0.1 is 10 %.
    kv_heads_per_gather: the number of key/value heads that all_gather sends at a time.
    whole: names of tensors of a batch that have no tokens, such as images: every rank of cp gets them whole.
    groups: "fixed": every microbatch's rows are split over all ranks of cp, equally many tokens to each. "by_length": the
    documents of a whole optimizer step are shared out over its microbatches and ranks, a short one to one rank and a long
    one to as many as it needs; "flexsp", "bytescale" and "zeppelin" do so by the rules of those papers (dynamic context
    parallelism, hybrid data parallelism). Give cp the ranks of dp_shard: groups form inside of cp.
    tokens_per_rank: with these the most tokens of a rank in a microbatch. rates: what they count with. node: how many
    consecutive ranks of cp are in a node, for them and for double_ring.
    sparse: attention sees only blocks of keys that are chosen at run time, by `BlockTopK` or `VerticalSlash`, in every layer
    and with any cp, one rank too; what the mask hides stays hidden. Ranks hold blocks in turn (striped), and keys of blocks
    travel only to ranks that chose them.
    """

    scheme: Scheme = "auto"
    balance: Literal["auto", Balance] = "auto"
    ulysses: int | None = None
    slack: float = 0.0
    kv_heads_per_gather: int = 1
    whole: tuple[str, ...] = ()
    groups: Literal["fixed", Rule] = "fixed"
    tokens_per_rank: int | None = None
    rates: Rates = field(default_factory=Rates)
    node: int = 8
    sparse: Sparse | None = None

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
                f"context scheme {self.scheme!r} with ulysses={self.ulysses}: only rings and group_cast have a second "
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

        self._refuse_odd_groups()
        self._refuse_odd_sparse()

    def _refuse_odd_sparse(self) -> None:
        if self.sparse is None:
            return
        if not isinstance(self.sparse, Sparse):
            raise PlanError(
                f"context sparse={self.sparse!r} is no choice of blocks. Give BlockTopK(block=64, top=16), or "
                "VerticalSlash; a window with sinks is a mask: mk.Mask.causal(tokens, window=..., sinks=...)."
            )
        of = f"context sparse={type(self.sparse).__name__} with"
        if self.scheme not in ("auto", "group_cast") or self.ulysses is not None:
            raise PlanError(
                f"{of} scheme={self.scheme!r} and ulysses={self.ulysses}: chosen blocks are sent directly to the ranks that "
                "chose them. Leave scheme and ulysses away."
            )
        if self.balance != "auto" or self.slack:
            raise PlanError(
                f"{of} balance={self.balance!r} and slack={self.slack}: ranks hold whole blocks, in turn. Leave balance and "
                "slack away."
            )
        if self.groups != "fixed":
            raise PlanError(
                f"{of} groups={self.groups!r}: these count with all pairs that the mask shows. Use groups='fixed'."
            )

    def reaches(self, ranks: int) -> bool:
        """Whether attention goes over cp: on one rank that of chosen blocks alone."""
        return ranks > 1 or self.sparse is not None

    def _refuse_odd_groups(self) -> None:
        if self.groups != "fixed" and self.groups not in get_args(Rule):
            raise PlanError(
                f"context groups {self.groups!r} do not exist. Choose one of fixed, {', '.join(get_args(Rule))}."
            )
        if (
            type(self.node) is not int
            or self.node < 1
            or (self.tokens_per_rank is not None and self.tokens_per_rank < 1)
        ):
            raise PlanError(
                f"context node={self.node}, tokens_per_rank={self.tokens_per_rank}: a node has at least 1 rank, and a rank "
                "room for at least 1 token."
            )
        if self.groups == "fixed":
            if self.tokens_per_rank is not None:
                raise PlanError(
                    f"context tokens_per_rank={self.tokens_per_rank} is of dynamic groups, and fixed ones give every rank as "
                    "many tokens. Leave it away, or use groups='by_length'."
                )
            return
        if self.scheme not in ("auto", "group_cast") or self.ulysses is not None:
            raise PlanError(
                f"context groups={self.groups!r} with scheme={self.scheme!r} and ulysses={self.ulysses}: a document is on "
                "ranks of its own, which send keys directly; a ring of all ranks, or heads traded among them, would send to "
                "ranks without it. Leave scheme and ulysses away."
            )
        if self.balance != "auto" or self.slack:
            raise PlanError(
                f"context groups={self.groups!r} with balance={self.balance!r} and slack={self.slack}: groups say by "
                "themselves which rank has which tokens. Leave balance and slack away."
            )
        if self.whole:
            raise PlanError(
                f"context groups={self.groups!r} with whole={self.whole}: documents leave their rows, which such tensors "
                "belong to. Use groups='fixed'."
            )

    def refuse_misfit(self, ranks: int) -> None:
        """Raises: PlanError if `ulysses`, or with double_ring `node`, does not divide the ranks of cp."""
        if self.ulysses is not None and (self.ulysses < 1 or ranks % self.ulysses):
            divisors = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            raise PlanError(
                f"context ulysses={self.ulysses} does not divide cp={ranks}. Choose one of {divisors}, or another cp."
            )
        if self.scheme == "double_ring" and ranks > 1 and (ranks % self.node or self.node % (self.ulysses or 1)):
            raise PlanError(
                f"context scheme 'double_ring' with node={self.node} and ulysses={self.ulysses} on cp={ranks}: nodes have "
                "equally many of its ranks, and hold groups of Ulysses whole. Give node, the ranks of cp in a node, or use "
                "scheme='ring' inside of one."
            )
