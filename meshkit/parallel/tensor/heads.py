"""The heads of attention that each rank of the tensor axis computes: full query heads, and the key/value heads they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from meshkit.core.linear import LinearShape, linear_shape, more_parameters
from meshkit.core.sharding import even_part
from meshkit.errors import PlanError
from meshkit.plan import Style, match_table
from meshkit.plan.auto import join


class Heads(NamedTuple):
    """The numbers of heads of one attention module that one rank computes."""

    query: int
    kv: int
    head_dim: int


def attention_heads(module: nn.Module, plan: Mapping[str, Style], *, size: int) -> dict[str, tuple[Heads, ...]]:
    """The heads that each of `size` tensor ranks computes in every attention module of the plan."""
    modules = dict(module.named_modules(remove_duplicate=False))
    styles = match_table(plan, modules, what="module")
    layers = {
        name: _latent_heads(name, style, styles, modules) if style.query else heads_of_all(name, module, style, modules)
        for name, module in modules.items()
        if (style := styles.get(name)) is not None and (style.kind == "attention" or style.query)
    }
    return {name: tuple(heads_of_rank(heads, size, rank) for rank in range(size)) for name, heads in layers.items()}


def widest_heads(module: nn.Module, plan: Mapping[str, Style], *, size: int) -> Heads | None:
    """The heads of the first attention module on the tensor rank that has most of them. None without attention."""
    layers = attention_heads(module, plan, size=size)
    return max(next(iter(layers.values()))) if layers else None


def heads_of_rank(heads: Heads, size: int, rank: int) -> Heads:
    query = tuple(even_part(heads.query, size, rank))
    return Heads(len(query), len(kv_heads_read_by(query, heads.query // heads.kv)), heads.head_dim)


def heads_of_all(name: str, module: nn.Module, style: Style, modules: dict[str, nn.Module]) -> Heads:
    head_dim = getattr(module, style.head_dim, None)
    if not isinstance(head_dim, int):
        raise PlanError(f"plan: attention() on {name!r} needs the size of a head in its attribute {style.head_dim!r}.")
    projections = [join(name, child) for child in style.projections]
    missing = [child for child in projections if child not in modules]
    if missing:
        raise PlanError(
            f"plan: attention() on {name!r} found no module {missing[0]!r}. Name its projections in attention()."
        )
    query, key = (linear_of(child, modules[child], "attention").out_features // head_dim for child in projections[:2])
    return Heads(query, key, head_dim)


def _latent_heads(name: str, style: Style, styles: Mapping[str, Style], modules: dict[str, nn.Module]) -> Heads:
    """The heads of latent attention: each group of the queries' features is a head, with a key and a value of its own."""
    child = join(name, style.query)
    query = styles.get(child)
    if child not in modules or query is None or query.kind != "column" or query.group == 1:
        problem = (
            f"{child!r} is {query or 'not covered'} in the plan"
            if child in modules
            else f"there is no module {child!r}"
        )
        raise PlanError(
            f"plan: enter(query={style.query!r}) on {name!r} names the child that makes the queries, but {problem}. Name a "
            "child that is column(group=...), where the group is the size of a head of q."
        )
    heads = linear_of(child, modules[child], "column").out_features // query.group
    return Heads(heads, heads, query.group)


def kv_heads_read_by(query_heads: tuple[int, ...], group: int) -> tuple[int, ...]:
    """The key/value heads that these query heads read: each once if all are read equally often, else one per query head."""
    # Attention repeats each key/value head equally often. Where a rank's query heads read them unevenly, it gets a copy for
    # each query head instead; autograd sums the copies' gradients.
    read = [head // group for head in query_heads]
    once = tuple(dict.fromkeys(read))
    return once if len({read.count(head) for head in once}) == 1 else tuple(read)


def linear_of(name: str, module: nn.Module, kind: str) -> LinearShape:
    shape = linear_shape(module)
    if shape is None or (shape.transposed and kind in ("vocab", "attention")):
        allowed = "nn.Linear or nn.Embedding" if kind == "vocab" else "nn.Linear"
        more = ", ".join(more_parameters(module)) if isinstance(module, nn.Linear) else ""
        with_more = f" with the parameters {more} besides" * bool(more)
        raise PlanError(
            f"plan: {kind}() on {name!r} needs an {allowed}, but it is a {type(module).__name__}{with_more}. Leave it whole: "
            "replicate()."
        )
    if "weight" not in module._parameters:
        raise PlanError(
            f"plan: {kind}() on {name!r} needs a weight to split, but it is computed from other parameters (weight_norm, "
            "spectral_norm). Leave the layer whole: replicate()."
        )
    return shape
