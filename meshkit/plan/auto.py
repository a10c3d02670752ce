"""Automatic plans: derived from the names and shapes of a model's modules, for models without a written plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from meshkit.errors import PlanError
from meshkit.plan.declared_experts import declared_experts
from meshkit.plan.styles import Plan, Style, attention, column, enter, per_head, replicate, row, sequence, split, vocab

# Names used by transformers' decoders of the Llama, Qwen2, Qwen3 and Mistral families, and by meshkit's own.
ATTENTION = {"q_proj": column(), "k_proj": column(), "v_proj": column(), "o_proj": row()}
GATED_MLP = {"gate_proj": column(), "up_proj": column(), "down_proj": row()}
# First and second linear layer of a plain MLP, under the names people give them.
MLP_PAIRS = [
    ("up", "down"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("w1", "w2"),
    ("linear1", "linear2"),
    ("in_proj", "out_proj"),
]
# Between a column and a row a rank has some of the features. Only a function of each feature alone gives the same there.
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)


def auto_plan(model: nn.Module) -> Plan:
    """Derive a plan from names and shapes; `print(plan)` shows what was decided.

    Decoders with transformers' Llama names are split by heads, features and vocabulary, and their repeated layers are the
    blocks. In other models, pairs of linear layers (`up`/`down`, `fc1`/`fc2`, or a Sequential of two linears with
    elementwise functions between) are split by features. Whatever else holds parameters is computed whole by every rank.
    Raises: PlanError for a model without parameters.
    """
    if not any(True for _ in model.parameters()):
        raise PlanError(f"auto_plan: {type(model).__name__} has no parameters, so there is nothing to plan.")
    # With duplicates, since a plan must cover every name of a module that stands in two places.
    modules = dict(model.named_modules(remove_duplicate=False))
    decoder = any(_is_attention(child) for child in modules.values()) or _generates(model)
    tensor: dict[str, Style] = {}
    for name, child in modules.items():
        if not any(map(_is_computed, child.children())):
            tensor |= {join(name, key): style for key, style in _split_styles(child)}
    # After the splits, and only where they left a module out.
    head = _head(model) if decoder else None
    around_experts = tuple(_parent(name) for name, child in modules.items() if declared_experts(child) is not None)
    for name, child in modules.items():
        if any(True for _ in child.parameters(recurse=False)):
            style = _other_style(name, child, decoder=decoder, head=child is head)
            # Beside experts stand the router and the gate of a shared expert, which see each token alone.
            beside = decoder and any(name.startswith(f"{block}.") for block in around_experts)
            tensor.setdefault(name, sequence() if beside and style == replicate() else style)
    layers = _layers(modules)
    if decoder and layers:
        tensor[layers[0]] = split()  # transformers computes positions and masks from the embedding's output
    mlps = [name for name, child in modules.items() if _is_gated_mlp(child)]
    return Plan(
        tensor=by_patterns(tensor, modules),
        blocks=tuple(by_patterns(dict.fromkeys(layers, replicate()), modules)),
        units=tuple(name for name in modules if decoder and _last(name) in ("embed_tokens", "lm_head")),
        mlps=tuple(by_patterns(dict.fromkeys(mlps, replicate()), modules)),
    )


def by_patterns(styles: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> dict[str, Style]:
    """A table of names as one of patterns: `layers.*.mlp` for modules of all layers that have one style, names for others."""
    alike: dict[str, list[str]] = {}
    for name in modules:
        alike.setdefault(_general(name, modules), []).append(name)
    table: dict[str, Style] = {}
    for name, style in styles.items():
        pattern = _general(name, modules)
        table[pattern if all(styles.get(other) == style for other in alike[pattern]) else name] = style
    return table


def _generates(model: nn.Module) -> bool:
    """Whether a model of transformers says that it makes tokens one after another."""
    return callable(asked := getattr(model, "can_generate", None)) and bool(asked())


def _head(model: nn.Module) -> nn.Module | None:
    """The output head, which transformers' models name themselves."""
    asked = getattr(model, "get_output_embeddings", None)
    found = asked() if callable(asked) else None
    return found if isinstance(found, nn.Linear) else getattr(model, "lm_head", None)


def _is_attention(module: nn.Module) -> bool:
    children = dict(module.named_children())
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int) or not all(isinstance(children.get(name), nn.Linear) for name in ATTENTION):
        return False
    heads = _query_heads(module)
    # What it holds itself it computes with in each head, as attention sinks do.
    return all(tuple(param.shape) == (heads,) for param in module.parameters(recurse=False))


def _query_heads(attention: nn.Module) -> int:
    projection = attention.get_submodule("q_proj")
    return int(projection.out_features) // int(attention.head_dim)  # type: ignore[arg-type]


def _is_computed(module: nn.Module) -> bool:
    """Whether it is a linear layer whose weight is computed from other parameters, as weight_norm does."""
    return isinstance(module, nn.Linear) and "weight" not in module._parameters


def _is_gated_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    plain = all(isinstance(children.get(name), nn.Linear) for name in GATED_MLP)
    return plain and not any(True for _ in module.parameters(recurse=False)) and not _is_attention(module)


def _split_styles(module: nn.Module) -> Iterator[tuple[str, Style]]:
    """(child, style) of what is split by heads or by features; the child is "" for the module itself."""
    children = dict(module.named_children())
    if (stacked := declared_experts(module)) is not None:
        yield "", stacked
    elif _is_attention(module):
        yield "", attention(split=tuple(key for key, _ in module.named_parameters(recurse=False)))
        norms = {"q_norm": per_head(), "k_norm": per_head()}
        yield from ((child, style) for child in children if (style := (ATTENTION | norms).get(child)) is not None)
    elif _is_gated_mlp(module):
        yield "", enter()
        yield from GATED_MLP.items()
    else:
        for first, second in [*_named_pairs(module), *_sequential_pairs(module)]:
            yield first, column()
            yield second, row()


def _other_style(name: str, module: nn.Module, *, decoder: bool, head: bool) -> Style:
    """The style of a module that holds parameters, and is split neither by heads nor by features."""
    if decoder and (isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and head)):
        return vocab()
    return sequence() if decoder and "norm" in _last(name) else replicate()


def _named_pairs(module: nn.Module) -> list[tuple[str, str]]:
    children = dict(module.named_children())
    return [
        (first, second)
        for first, second in MLP_PAIRS
        if isinstance(up := children.get(first), nn.Linear)
        and isinstance(down := children.get(second), nn.Linear)
        and up.out_features == down.in_features
    ]


def _sequential_pairs(module: nn.Module) -> list[tuple[str, str]]:
    """(first, second) linear layers of a Sequential with only elementwise functions between them."""
    if not isinstance(module, nn.Sequential):
        return []
    pairs: list[tuple[str, str]] = []
    first: str | None = None
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            if first is not None:
                pairs.append((first, name))
            # The second ends its pair: as a first of the next it would be split twice, by rows and by columns.
            first = None if first is not None else name
        elif not isinstance(child, ELEMENTWISE):
            first = None
    return pairs


def _layers(modules: dict[str, nn.Module]) -> list[str]:
    """The repeated blocks: the ModuleList that the model declares to be them, or the longest that stands in no other, in a
    decoder of those with attention. Layers may be of several kinds."""
    lists = {name: child for name, child in modules.items() if isinstance(child, nn.ModuleList) and len(child)}
    name = _declared_layers(modules)
    if name is None:
        # A layer may hold a list that is longer than the list of layers, as of experts.
        several = tuple(f"{name}." for name, child in lists.items() if len(child) > 1)
        outer = {name: child for name, child in lists.items() if not name.startswith(several)}
        # A list without attention is none of a decoder's blocks.
        attending = {name: child for name, child in outer.items() if any(map(_is_attention, child.modules()))}
        # On a tie the one that is named first.
        name = max(attending or outer, key=lambda name: len(lists[name]), default=None)
    return [] if name is None else [join(name, key) for key in lists[name]._modules]


def _declared_layers(modules: dict[str, nn.Module]) -> str | None:
    """The list that `base_model_pp_plan` of a config names, by which transformers' models are cut into stages."""
    for name, child in modules.items():
        for key in getattr(getattr(child, "config", None), "base_model_pp_plan", None) or {}:
            if isinstance(modules.get(join(name, key)), nn.ModuleList):
                return join(name, key)
    return None


def _general(name: str, modules: Mapping[str, nn.Module]) -> str:
    """`layers.3.mlp` to `layers.*.mlp`: members of a ModuleList are alike, members of a Sequential are not."""
    parts = name.split(".")
    return ".".join(
        "*" if isinstance(modules.get(".".join(parts[:index])), nn.ModuleList) else part
        for index, part in enumerate(parts)
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def join(prefix: str, name: str) -> str:
    return ".".join(filter(None, (prefix, name)))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
