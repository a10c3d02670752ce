"""A plan for models nobody wrote a plan for, by the names and shapes of their modules, saying what was decided."""

from __future__ import annotations

from functools import partial

from torch import nn

from meshkit.errors import PlanError
from meshkit.plan import Plan, Style, attention, column, enter, per_head, replicate, row, sequence, split, vocab

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
    modules = dict(model.named_modules(remove_duplicate=False))
    general = partial(_general, modules=modules)
    tensor: dict[str, Style] = {}
    mlps: dict[str, None] = {}
    decoder = False
    for name, child in modules.items():
        held = dict(child.named_children())
        if ATTENTION.keys() <= held.keys() and isinstance(getattr(child, "head_dim", None), int):
            decoder = True
            _add(tensor, general(name), attention())
            for key in held:
                style = ATTENTION.get(key) or (per_head() if key in ("q_norm", "k_norm") else None)
                if style is not None:
                    _add(tensor, general(f"{name}.{key}"), style)
        elif GATED_MLP.keys() <= held.keys():
            _add(tensor, general(name), enter())
            mlps[general(name)] = None
            for key, style in GATED_MLP.items():
                _add(tensor, general(f"{name}.{key}"), style)
        else:
            for first, second in [*_named_pairs(child), *_sequential_pairs(child)]:
                _add(tensor, general(_join(name, first)), column())
                _add(tensor, general(_join(name, second)), row())
    for name, child in modules.items():
        pattern = general(name)
        if pattern in tensor or not list(child.parameters(recurse=False)):
            continue
        if decoder and isinstance(child, nn.Embedding):
            tensor[pattern] = vocab()
        elif decoder and isinstance(child, nn.Linear) and name.rpartition(".")[2] == "lm_head":
            tensor[pattern] = vocab()
        elif decoder and "norm" in name.rpartition(".")[2]:
            tensor[pattern] = sequence()
        else:
            tensor[pattern] = replicate()
    layers = _layers(modules)
    if decoder and layers:
        tensor[layers[0]] = split()  # transformers computes positions and masks from the embedding's output
    blocks = tuple(dict.fromkeys(general(name) for name in layers))
    ends = tuple(name for name in modules if decoder and name.rpartition(".")[2] in ("embed_tokens", "lm_head"))
    return Plan(tensor=tensor, blocks=blocks, units=ends, mlps=tuple(mlps))


def _add(tensor: dict[str, Style], pattern: str, style: Style) -> None:
    if tensor.setdefault(pattern, style) != style:
        raise PlanError(
            f"auto_plan: modules like {pattern!r} are not alike ({tensor[pattern]} and {style}). Write the plan."
        )


def _named_pairs(module: nn.Module) -> list[tuple[str, str]]:
    held = dict(module.named_children())
    return [
        (first, second)
        for first, second in MLP_PAIRS
        if isinstance(up := held.get(first), nn.Linear)
        and isinstance(down := held.get(second), nn.Linear)
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
            first = None if first is not None else name
        elif not isinstance(child, ELEMENTWISE):
            first = None
    return pairs


def _layers(modules: dict[str, nn.Module]) -> list[str]:
    """The members of the longest ModuleList of modules of one type: the repeated blocks."""
    lists = {
        name: child
        for name, child in modules.items()
        if isinstance(child, nn.ModuleList) and len({type(member) for member in child}) == 1
    }
    if not lists:
        return []
    name, best = max(lists.items(), key=lambda item: len(item[1]))
    return [f"{name}.{index}" if name else str(index) for index in range(len(best))]


def _general(name: str, modules: dict[str, nn.Module]) -> str:
    """`layers.3.mlp` to `layers.*.mlp`: members of a ModuleList are alike, members of a Sequential are not."""
    parts = name.split(".")
    return ".".join(
        "*" if isinstance(modules.get(".".join(parts[:index])), nn.ModuleList) else part
        for index, part in enumerate(parts)
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
