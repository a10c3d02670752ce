"""The layout of tensor parallelism, as data: the placement of each parameter, and the calls that communicate. Needs no ranks.

`tensor_parallel` executes it, `explain` prints it with its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from meshkit.core.linear import LinearShape, is_linear, linear_shape
from meshkit.core.quantized_weight import codes_of
from meshkit.core.sharding import even_part
from meshkit.errors import PlanError
from meshkit.parallel.tensor.heads import Heads, heads_of_all, heads_of_rank, kv_heads_read_by, linear_of
from meshkit.plan import Style, match_table
from meshkit.plan.auto import join


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """One parameter on the tensor axis.

    gradient: "own": of this rank's shard. "same": of the full parameter, equal on every rank. "sum": of the full parameter,
    of which each rank has a summand. indices: for each rank the rows (dim 0) or columns (dim 1) that it computes with, where
    they are not its shard.
    """

    placement: Shard | Replicate
    gradient: Literal["own", "same", "sum"]
    dim: int = 0
    indices: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Call:
    """One communicating step in the forward of a module.

    enter: a region begins, with an all-gather (sequence=True) or nothing, and an all-reduce in backward. leave: a region ends
    in a reduce-scatter or an all-reduce; leave_whole: in an all-reduce always. split: the sequence is split; split_after: a
    module's output is. gather_split: it is gathered around a module. gather: gathered before a module. join_features: a
    module's output features are joined, for what is computed alike on all ranks; gather_features: for what is not.
    width: the size of the last dim of what is sent. whole: inside of a container that has all tokens, so that no sequence is
    gathered or split here.
    """

    module: str
    kind: Literal[
        "enter",
        "leave",
        "leave_whole",
        "split",
        "split_after",
        "gather_split",
        "gather",
        "join_features",
        "gather_features",
    ]
    width: int
    whole: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    size: int
    sequence: bool
    params: dict[str, ParamLayout] = field(default_factory=dict)  # by name; a tied parameter under each of its names
    calls: list[Call] = field(default_factory=list)
    styles: dict[str, Style] = field(default_factory=dict)
    shared_entry: dict[str, str] = field(default_factory=dict)  # column module -> the container that enters for it
    heads: dict[str, tuple[Heads, ...]] = field(default_factory=dict)  # attention module -> the heads of each rank
    whole: set[str] = field(default_factory=set)  # containers that have all tokens, with all that is in them

    def is_in_whole(self, name: str) -> bool:
        """Whether the module is inside of a container that every rank computes in full."""
        return any(name.startswith(f"{container}.") for container in self.whole)


def tensor_layout(module: nn.Module, plan: Mapping[str, Style], *, size: int, sequence: bool) -> TensorLayout:
    """Match the plan against the module and decide every parameter's layout on an axis of `size` ranks.

    Raises: PlanError for a pattern that matches nothing, a module with parameters that no pattern covers, a style on a
    module it cannot serve, more ranks than query heads.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    layout = TensorLayout(size=size, sequence=sequence, styles=match_table(plan, modules, what="module"))
    layout.whole.update(
        name
        for name, style in layout.styles.items()
        if style.kind == "replicate" and name and _is_container(modules[name])
    )
    for name, child in modules.items():
        _add_module(layout, name, child)
    # Containers after all modules: the heads of an attention may change the layout of its projections.
    for name, style in layout.styles.items():
        if style.kind == "split" and sequence:
            layout.calls.append(Call(module=name, kind="split", width=_width(modules[name])))
        elif style.kind in ("enter", "attention"):
            _add_container(layout, name, modules[name], style, modules)
    # Columns after containers: those inside of one share its entry.
    for name, style in ((name, layout.styles[name]) for name in modules if name in layout.styles):
        if style.kind == "column" and not style.inner and not isinstance(modules[name], nn.Embedding):
            _add_column_calls(layout, name, linear_of(name, modules[name], "column"), style)
    for name, child in modules.items():
        _refuse_split_blocks(layout, name, child)
    _check_tied(module, layout)
    return layout


def _add_module(layout: TensorLayout, name: str, module: nn.Module) -> None:
    """Decide the layout of the parameters that are the module's own, by its style."""
    style = layout.styles.get(name)
    keys = [key for key, _ in module.named_parameters(recurse=False)]
    if style is None:
        if keys:
            raise PlanError(
                f"plan: module {name or '(the model itself)'!r} ({type(module).__name__}) holds the parameter "
                f"{keys[0]!r}, but no pattern of the tensor plan covers it. Give it a style: column(), row(), "
                "vocab(), sequence(), per_head() or replicate()."
            )
    elif style.kind in ("column", "row", "vocab"):
        _add_sharded(layout, name, module, style)
    elif style.kind in ("enter", "attention", "split"):
        _refuse_uneven_numbers(layout, name, module, style)
        _add_own(layout, name, module, style)
    elif style.kind != "experts":  # theirs is the expert view
        _add_replicated(layout, name, module, style, keys)


def _add_replicated(layout: TensorLayout, name: str, module: nn.Module, style: Style, keys: list[str]) -> None:
    """A module that every rank holds in full. If it computes with a shard of heads or tokens, its gradients are summands."""
    summed = style.kind == "per_head" or (style.kind == "sequence" and layout.sequence)
    for key in keys:
        whole = ParamLayout(placement=Replicate(), gradient="sum" if summed else "same")
        split = ParamLayout(placement=Shard(0), gradient="own")
        layout.params[join(name, key)] = split if key in style.columns else whole
    gathers = style.kind == "replicate" and layout.sequence and not style.inner and not layout.is_in_whole(name)
    if gathers and (keys or name in layout.whole):
        layout.calls.append(Call(module=name, kind="gather_split", width=_width(module)))
    if style.kind == "head" and layout.sequence:
        layout.calls.append(Call(module=name, kind="gather", width=linear_of(name, module, "head").in_features))


def _add_own(layout: TensorLayout, name: str, module: nn.Module, style: Style) -> None:
    """Parameters that a container holds itself: those named in its style have one element for each head."""
    own = dict(module.named_parameters(recurse=False))
    if (missing := next((key for key in style.columns if key not in own), None)) is not None:
        raise PlanError(f"plan: {style} on {name!r} splits its parameter {missing!r}, but it holds {list(own)}.")
    summed = style.kind != "split" or layout.sequence
    for key in own:
        whole = ParamLayout(placement=Replicate(), gradient="sum" if summed else "same")
        split = ParamLayout(placement=Shard(0), gradient="own")
        layout.params[join(name, key)] = split if key in style.columns else whole


def refuse_whole_stream(module: nn.Module, plan: Mapping[str, Style]) -> None:
    """Raises: PlanError for a model whose hidden states are not split anywhere, where sequence=True is asked for.

    An embedding with vocab(), or a container with split(), splits them. Without, every rank would take all tokens for its
    own.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    styles = match_table(plan, modules, what="module")
    for name, style in styles.items():
        if style.kind == "split" or (style.kind == "vocab" and isinstance(modules[name], nn.Embedding)):
            return
    embeddings = [name for name in styles if isinstance(modules[name], nn.Embedding)]
    raise PlanError(
        "sequence=True shards hidden states along the sequence, but the plan cuts them nowhere"
        + (
            f": {embeddings[0]!r} is looked up whole ({styles[embeddings[0]]}). Give it vocab()"
            if embeddings
            else ". Give an embedding vocab()"
        )
        + ", or split() to the first module that takes them whole; or use sequence=False."
    )


def _add_sharded(layout: TensorLayout, name: str, module: nn.Module, style: Style) -> None:
    shard = ParamLayout(placement=Shard(0), gradient="own")
    weight, bias = join(name, "weight"), join(name, "bias")
    if style.kind == "vocab" and isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise PlanError(f"plan: vocab() on {name!r}: max_norm, scale_grad_by_freq and sparse are not supported.")
        layout.params[weight] = shard
        splits = any(other.kind == "split" for other in layout.styles.values())
        layout.calls.append(Call(module=name, kind="leave_whole" if splits else "leave", width=module.embedding_dim))
        return
    if style.kind == "column" and isinstance(module, nn.Embedding):
        layout.params[weight] = ParamLayout(placement=Shard(1), gradient="own", dim=1)
        return
    linear = linear_of(name, module, style.kind)
    if style.group > 1:
        _refuse_split_groups(layout, name, linear, style)
    biased = module._parameters.get("bias") is not None
    if style.kind == "row":
        layout.params[weight] = ParamLayout(placement=Shard(linear.in_dim), gradient="own", dim=linear.in_dim)
        if biased:  # added once, after the sum
            gradient: Literal["same", "sum"] = "sum" if layout.sequence and not layout.is_in_whole(name) else "same"
            layout.params[bias] = ParamLayout(placement=Replicate(), gradient=gradient)
        if not style.inner:
            whole = layout.is_in_whole(name)
            layout.calls.append(Call(module=name, kind="leave", width=linear.out_features, whole=whole))
        return
    layout.params[weight] = ParamLayout(placement=Shard(linear.out_dim), gradient="own", dim=linear.out_dim)
    if biased:
        layout.params[bias] = shard
    if style.kind == "vocab":
        layout.calls.append(Call(module=name, kind="enter", width=linear.in_features))


def _add_column_calls(layout: TensorLayout, name: str, linear: LinearShape, style: Style) -> None:
    """What a column sends that its container does not send for it."""
    whole = layout.is_in_whole(name)
    if style.gather and linear.out_features % layout.size:
        raise PlanError(
            f"plan: column(gather=True) on {name!r}: tp={layout.size} does not divide its {linear.out_features} features. "
            "Use replicate()."
        )
    if style.parts and (
        sum(style.parts) != linear.out_features
        or any(part % layout.size for part in (*style.parts, linear.out_features))
    ):
        raise PlanError(
            f"plan: column(parts={style.parts}) on {name!r}, which has {linear.out_features} features: parts are all of "
            f"them, and tp={layout.size} divides each. Use column(gather=True), or another tp."
        )
    if name in layout.shared_entry:
        if style.gather or style.parts:
            layout.calls.append(Call(module=name, kind="gather_features", width=linear.out_features))
        return
    layout.calls.append(Call(module=name, kind="enter", width=linear.in_features, whole=whole))
    if style.parts:
        layout.calls.append(Call(module=name, kind="gather_features", width=linear.out_features))
    if style.gather:
        layout.calls.append(Call(module=name, kind="join_features", width=linear.out_features))
        if layout.sequence and not whole:
            layout.calls.append(Call(module=name, kind="split_after", width=linear.out_features))


def _refuse_uneven_numbers(layout: TensorLayout, name: str, module: nn.Module, style: Style) -> None:
    """Raises: PlanError for a number of enter(local=...) that the module has not, or that the axis does not divide."""
    for path in style.local:
        value = number_of(module, path)
        if value is None or value % layout.size:
            raise PlanError(
                f"plan: enter(local=...) on {name!r}: {path} is {value}, and tp={layout.size} needs a whole number that it "
                "divides. Name attributes that count heads or features."
            )


def number_of(module: nn.Module, path: str) -> int | None:
    """A whole number that a module's forward reads, "num_heads" or "config.num_heads"; None for anything else."""
    value: object = module
    for part in path.split("."):
        try:
            value = getattr(value, part, None)
        except Exception:  # a config that differs between layers has no one number, and says so by an error of its own
            return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def shares_of(parts: tuple[int, ...], size: int, rank: int) -> list[int]:
    """The features of a rank: its share of each part."""
    starts = [sum(parts[:index]) for index in range(len(parts))]
    return [
        feature
        for start, part in zip(starts, parts, strict=True)
        for feature in range(start + rank * part // size, start + (rank + 1) * part // size)
    ]


def _is_container(module: nn.Module) -> bool:
    """Whether it is called, and what it calls has parameters."""
    lists = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not lists and any(True for child in module.children() for _ in child.parameters())


def _refuse_split_groups(layout: TensorLayout, name: str, linear: LinearShape, style: Style) -> None:
    features = linear.in_features if style.kind == "row" else linear.out_features
    groups = features // style.group
    if features % style.group or groups % layout.size:
        raise PlanError(
            f"plan: {name!r} has {features} features in groups of {style.group}, and tp={layout.size} does not divide the "
            f"{groups} groups. Choose a tp that divides {groups}."
        )


def _refuse_split_blocks(layout: TensorLayout, name: str, module: nn.Module) -> None:
    """Raises: PlanError where a quantized weight would be split inside of a block, whose codes share one scale."""
    codes = codes_of(module)
    if codes is None or not isinstance(module, nn.Linear):
        return
    placement = layout.params[join(name, "weight")].placement
    if isinstance(placement, Shard) and placement.dim == 1 and module.in_features % (codes.block * layout.size):
        raise PlanError(
            f"plan: the rows of {name!r}, {module.in_features} features in few bits, are split over tp={layout.size}, but "
            f"not into whole blocks of {codes.block}. Give mk.lora a base_block that divides "
            f"{module.in_features / layout.size:g}, or use another tp."
        )


def _add_container(
    layout: TensorLayout, name: str, module: nn.Module, style: Style, modules: dict[str, nn.Module]
) -> None:
    below = (f"{name}.{child}" for child, _ in module.named_modules(remove_duplicate=False) if child)
    inside = [child for child in below if child in layout.styles]
    columns = [child for child in inside if layout.styles[child].kind == "column"]
    if not columns:
        raise PlanError(f"plan: {style} on {name!r} enters the axis for its column() children, but has none.")
    if style.each:
        return
    layout.shared_entry.update(dict.fromkeys(columns, name))
    # The region's input is that of its first linear layer, which may be a replicated projection before the columns.
    first = next(child for child in inside if is_linear(modules[child]))
    width = linear_of(first, modules[first], "column").in_features
    layout.calls.append(Call(module=name, kind="enter", width=width, whole=layout.is_in_whole(name)))
    if style.kind == "attention":
        _split_heads(layout, name, module, style, modules)


def _split_heads(
    layout: TensorLayout, name: str, module: nn.Module, style: Style, modules: dict[str, nn.Module]
) -> None:
    """Give every rank full query heads and the key/value heads that they read."""
    query_heads, kv_heads, head_dim = heads = heads_of_all(name, module, style, modules)
    if layout.size > query_heads:
        raise PlanError(
            f"tp={layout.size} needs at least {layout.size} query heads, but {name!r} has {query_heads}. "
            f"Use tp of at most {query_heads}."
        )
    layout.heads[name] = tuple(heads_of_rank(heads, layout.size, rank) for rank in range(layout.size))
    query, key, value, output = (join(name, child) for child in style.projections)
    query_of_rank = [tuple(even_part(query_heads, layout.size, rank)) for rank in range(layout.size)]
    kv_of_rank = [kv_heads_read_by(of_rank, query_heads // kv_heads) for of_rank in query_of_rank]
    # DTensor would cut heads in two where the axis does not divide them. So those projections stay full on every rank, and a
    # rank computes with the rows of its heads: that costs memory, and an all-reduce of their gradient.
    if query_heads % layout.size:
        for key in style.columns:
            layout.params[join(name, key)] = ParamLayout(
                placement=Replicate(), gradient="sum", indices=tuple(query_of_rank)
            )
        _replicate_heads(layout, query, 0, query_of_rank, head_dim)
        _replicate_heads(layout, output, 1, query_of_rank, head_dim)
    if query_heads % layout.size or kv_heads % layout.size:
        _replicate_heads(layout, key, 0, kv_of_rank, head_dim)
        _replicate_heads(layout, value, 0, kv_of_rank, head_dim)


def _replicate_heads(layout: TensorLayout, name: str, dim: int, heads: list[tuple[int, ...]], head_dim: int) -> None:
    """Replicate the projection; each rank computes with the rows or columns of its heads. heads: of each rank."""
    indices = tuple(tuple(h * head_dim + i for h in of_rank for i in range(head_dim)) for of_rank in heads)
    replicated = ParamLayout(placement=Replicate(), gradient="sum", dim=dim, indices=indices)
    layout.params[join(name, "weight")] = replicated
    if dim == 0 and join(name, "bias") in layout.params:
        layout.params[join(name, "bias")] = replicated
    for child, inner in layout.styles.items():  # an adapter's layers are split as the projection is
        if inner.inner and child.startswith(f"{name}.") and inner.kind == ("row" if dim else "column"):
            layout.params[join(child, "weight")] = replicated


def _check_tied(module: nn.Module, layout: TensorLayout) -> None:
    """Raises: PlanError for a tied parameter whose names have different layouts."""
    # A tied parameter stays one DTensor, which has one placement.
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(param), name)
        if layout.params.get(name) != layout.params.get(other):
            raise PlanError(
                f"plan: {name!r} and {other!r} are one tied parameter, but the plan lays them out differently "
                f"({layout.params[name].placement} and {layout.params[other].placement}). Give both modules the same style."
            )


def readers(modules: Mapping[str, nn.Module], layout: TensorLayout, call: Call) -> list[str]:
    """The linear layers that may read the input of a region: all inside of it except rows, which end it."""
    return [
        name
        for name, child in modules.items()
        if (name == call.module or name.startswith(call.module + "."))
        and isinstance(child, nn.Linear)
        and getattr(layout.styles.get(name), "kind", "row") != "row"
    ]


def _width(module: nn.Module) -> int:
    if (shape := linear_shape(module)) is not None:
        return shape.in_features
    # The size of the stream, which norms and layers of a module end in; a scalar says nothing.
    return next((param.shape[-1] for param in module.parameters() if param.ndim), 1)
