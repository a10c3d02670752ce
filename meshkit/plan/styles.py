"""Styles of tensor parallelism (column, row, vocabulary, sequence) and `Plan`, a table from name patterns to styles.

In a pattern `*` is one component of a module's dotted name, `**` any number of them, and `{q,k}` a choice:
`"layers.*.self_attn.{q,k,v}_proj"`. Matching is strict: a pattern that matches nothing, and a module that two patterns
match, are errors. A style marked `optional` may match nothing, for one plan that serves several models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from meshkit.errors import PlanError
from meshkit.plan.match import frozen_table, listed

Kind = Literal[
    "column", "row", "vocab", "sequence", "per_head", "replicate", "enter", "attention", "split", "experts", "head"
]
InitKind = Literal["normal", "uniform", "constant"]
Packed = Literal["", "halves", "pairs"]
Takes = Literal["routing", "indices"]


@dataclass(frozen=True)
class Style:
    """How one module is split on the tensor or expert axes. Made by the functions below, which document the kinds."""

    # One class for all kinds, and not one each: a layout branches on `kind`, and two styles that say the same are equal.
    kind: Kind
    optional: bool = False
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    head_dim: str = "head_dim"
    query: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    packed: Packed = ""
    transposed: bool = False
    takes: Takes = "routing"
    group: int = 1
    gather: bool = False
    parts: tuple[int, ...] = ()
    local: tuple[str, ...] = ()
    each: bool = False
    outside: bool = False
    inner: bool = False
    """nothing is sent for the module, since its parent calls it on the parent's own input or output (an adapter's layers)"""

    # The annotation holds only where a type checker runs.
    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise PlanError(f"Style({self.kind!r}): choose one of {', '.join(get_args(Kind))}.")
        for name, known in (("packed", Packed), ("takes", Takes)):
            if getattr(self, name) not in get_args(known):
                choices = ", ".join(map(repr, get_args(known)))
                raise PlanError(f"{self.kind}({name}={getattr(self, name)!r}): choose one of {choices}.")
        for name in ("projections", "columns", "rows", "local"):
            object.__setattr__(self, name, listed(getattr(self, name), where="Style", argument=name))

    def __str__(self) -> str:
        texts = [f"{name}=True" for name in ("gather", "each", "outside", "optional") if getattr(self, name)]
        texts += [f"{name}={value}" for name in ("parts", "local") if (value := getattr(self, name))]
        texts += [f"split={self.columns}"] if self.columns and self.kind != "experts" else []
        return f"{self.kind}({', '.join(texts)})"


def column(*, group: int = 1, gather: bool = False, parts: tuple[int, ...] = (), optional: bool = False) -> Style:
    """Linear: each rank holds a slice of the output features, and computes only those. So of an Embedding that has a feature
    for each head, as relative positions do.

    group: size of the groups of features that stay together, of a head for one; the axis must divide the number of groups.
    gather: the features are then joined, and every rank has all of them: what follows needs them all, as a norm over the
    full width or a router does.
    parts: numbers of features that one layer makes side by side, as q, k and v, or a gate and what it multiplies: of each
    part a rank computes its share. The weight is held in slices as it lies, as in checkpoints, so the features of a slice
    are gathered and each rank takes those of its shares.
    """
    if gather and parts:
        raise PlanError(
            "column(gather=True, parts=...): either all features are joined, or each part is shared. Choose one."
        )
    return Style("column", optional, group=group, gather=gather, parts=tuple(parts))


def row(*, group: int = 1, optional: bool = False) -> Style:
    """Linear: each rank holds a slice of the input features; the partial outputs are summed over the axis.

    group: as for column().
    """
    return Style("row", optional, group=group)


def vocab(*, optional: bool = False) -> Style:
    """Embedding or output head: each rank holds a slice of the vocabulary.

    The head returns logits as a DTensor sharded on the last dim, which `meshkit.cross_entropy` takes.
    """
    return Style("vocab", optional)


def sequence(*, optional: bool = False) -> Style:
    """A module on the residual stream, such as a norm: replicated; with sequence=True it sees this rank's tokens only."""
    return Style("sequence", optional)


def per_head(*, optional: bool = False) -> Style:
    """A module between column and row, such as a query norm: replicated, and applied to this rank's heads or features."""
    return Style("per_head", optional)


def replicate(*, outside: bool = False, optional: bool = False) -> Style:
    """A module that every rank computes in full, on the full sequence.

    outside: its parameters are read outside of its forward too, by a parent that computes with them.

    On a container: its first input and its output are all tokens, so what it holds is not split along the sequence either.
    """
    return Style("replicate", optional, outside=outside)


def head(*, optional: bool = False) -> Style:
    """A module that ends the model and that every rank computes in full, such as a score; so its output is not sharded."""
    return Style("head", optional)


def enter(
    *,
    query: str = "",
    local: tuple[str, ...] = (),
    split: tuple[str, ...] = (),
    each: bool = False,
    optional: bool = False,
) -> Style:
    """A container whose first input feeds several column() children: the axis is entered once, not once per child.

    local: its attributes that count heads or features, by which its forward views a tensor ("num_heads"): a rank's are the
    axis' share. "config.num_heads" is one of a config, of which the container gets a copy.
    split: parameters that it holds itself and that have something for each head, as attention sinks do. What it holds besides
    is whole.
    each: its columns enter one by one, as they do without a container: for several inputs, as cross-attention has, and for a
    residual inside of it.
    query: for latent attention, the child that makes the queries, which is column(group=size of a head). Each query head has
    a key and a value head. Traffic on cp is predicted from it.
    """
    return Style("enter", optional, query=query, local=local, columns=split, each=each)


def split(*, optional: bool = False) -> Style:
    """A container whose first input is the full sequence: with sequence=True it is split here.

    For models that compute positions or masks from the embedding's output, which a split() in the plan leaves full. Without
    one the embedding ends in a reduce-scatter, which leaves each rank its tokens and sends half as much.
    """
    return Style("split", optional)


def attention(
    *,
    query: str = "q_proj",
    key: str = "k_proj",
    value: str = "v_proj",
    output: str = "o_proj",
    head_dim: str = "head_dim",
    split: tuple[str, ...] = (),
    optional: bool = False,
) -> Style:
    """enter() for an attention module: its column() and row() children are split by whole heads.

    `head_dim` names the module's attribute with the size of a head. If the axis does not divide the key/value heads, every
    rank stores all of them, and computes those that its query heads read. split: as for enter().
    """
    # Names and not modules: a plan is made without a model, and serves all of one family.
    return Style("attention", optional, (query, key, value, output), head_dim, columns=split)


def experts(
    *,
    columns: tuple[str, ...] = ("gate_proj", "up_proj"),
    rows: tuple[str, ...] = ("down_proj",),
    packed: Packed = "",
    transposed: bool = False,
    takes: Takes = "routing",
    optional: bool = False,
) -> Style:
    """A module of stacked experts, sharded over the axes ep and etp of the expert view; see `expert_parallel`.

    columns: its parameters [experts, features, inputs]; rows: those [experts, outputs, features]; biases are among them:
    [experts, features] and [experts, outputs]. transposed: [experts, inputs, features] and [experts, features, outputs].
    etp splits the features. packed: each of `columns` holds two projections, gate and up: "halves", all features of one
    before those of the other; "pairs", feature by feature in turn.
    takes: what the module's forward is called with: "routing", as meshkit's own; "indices", as transformers' (see
    `expert_parallel`).
    The module's inputs are all tokens with sequence=False, and this rank's with sequence=True.
    """
    return Style("experts", optional, columns=columns, rows=rows, packed=packed, transposed=transposed, takes=takes)


@dataclass(frozen=True)
class Init:
    """How a parameter gets its first value: `normal` (std), `uniform` (half-width) or `constant` (value)."""

    kind: InitKind
    scale: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(InitKind):
            raise PlanError(f"Init({self.kind!r}): choose one of {', '.join(get_args(InitKind))}.")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens to each part of a model.

    tensor: module pattern -> style on the tensor axis. Every module that holds parameters must be covered when tp > 1.
    blocks: patterns of the repeated blocks: the units of sharding, recompute and compile.
    units: patterns of further modules that fully_shard gathers and frees on their own (embedding, head).
    attention: patterns of modules that call F.scaled_dot_product_attention on their own, for cp; models that take a `mask`
    and transformers' need none.
    mlps: patterns of feed-forwards, which treat every token alike: what `MemoryPolicy.mlp_chunks` runs in parts.
    init: parameter pattern -> initial value; what is not named is drawn as `initialize.default_init` says.
    notes: what `print` says of it besides: the share of parameters that are split, and why others are not.
    """

    tensor: Mapping[str, Style] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    mlps: tuple[str, ...] = ()
    init: Mapping[str, Init] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("blocks", "units", "attention", "mlps"):
            object.__setattr__(self, name, listed(getattr(self, name), where="Plan", argument=name))
        object.__setattr__(self, "tensor", frozen_table(self.tensor, Style, where="Plan", argument="tensor"))
        object.__setattr__(self, "init", frozen_table(self.init, Init, where="Plan", argument="init"))

    @staticmethod
    def of_parts(own: Plan | None = None, /, **parts: Plan) -> Plan:
        """The plan of a model of several parts, from one for each: `Plan.of_parts(encoder=..., decoder=LLAMA_PLAN)`.

        own: of what stands in the model itself.
        """

        def joined(table: Callable[[Plan], Mapping[str, Any]]) -> dict[str, Any]:
            found = dict(table(own or Plan()))
            for name, plan in parts.items():
                found |= {f"{name}.{pattern}" if pattern else name: each for pattern, each in table(plan).items()}
            return found

        return Plan(
            tensor=joined(lambda plan: plan.tensor),
            blocks=tuple(joined(lambda plan: dict.fromkeys(plan.blocks))),
            units=tuple(joined(lambda plan: dict.fromkeys(plan.units))),
            attention=tuple(joined(lambda plan: dict.fromkeys(plan.attention))),
            mlps=tuple(joined(lambda plan: dict.fromkeys(plan.mlps))),
            init=joined(lambda plan: plan.init),
        )

    def __str__(self) -> str:
        lines = ["Plan"]
        for title, table in (("tensor", self.tensor), ("init", self.init)):
            lines += [f"  {title:7} {pattern:42} {value}" for pattern, value in table.items()]
        for title, patterns in (
            ("blocks", self.blocks),
            ("units", self.units),
            ("attends", self.attention),
            ("mlps", self.mlps),
        ):
            lines += [f"  {title:7} {pattern}" for pattern in patterns]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)


def style_table(plan: object, *, where: str) -> Mapping[str, Style]:
    """The table of styles that a block is given. Raises: PlanError for a whole `Plan`, and for anything else."""
    if isinstance(plan, Plan):
        raise PlanError(f"{where}(plan=Plan(...)): a block alone takes the table of styles. Give plan.tensor.")
    return frozen_table(plan, Style, where=where, argument="plan")
