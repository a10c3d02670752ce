"""Attaching LoRA adapters to a plain model, and deriving the plan that shards them with their layers (QLoRA too)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from meshkit.core.model_state import copies_of
from meshkit.core.quantized_weight import BlockCodes, Codes, quantized_linear
from meshkit.errors import PlanError
from meshkit.initialize import fill
from meshkit.lora._adapter import A, AdapterLinear, B, Lora, adapt, adapted, lora_of, refuse_peft, set_lora
from meshkit.plan import Plan, Style, match_names, match_table, per_head
from meshkit.plan.auto import auto_plan
from meshkit.plan.match import match_blocks
from meshkit.program import without_values

P = TypeVar("P", Plan, None)


def attach(
    model: nn.Module,
    plan: P,
    *,
    rank: int = 16,
    alpha: float = 32.0,
    targets: Iterable[str] | None = None,
    rslora: bool = False,
    dropout: float = 0.0,
    modules_to_save: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    base: Codes | None = None,
    base_block: int = 64,
    seed: int = 0,
) -> P:
    """Freeze the model and add LoRA adapters to linear layers, in place; returns the plan that also shards the adapters.

    Call it on a plain model, also on meta, before `parallelize`, and give `parallelize` the returned plan. plan: None for the
    one that `parallelize` derives, which then shards the adapters with their layers.
    targets: patterns of linear layers, as in a plan; None: all in the plan's blocks. alpha: the adapters' output is scaled by
    alpha / rank, with rslora by alpha / sqrt(rank). dropout: of the adapters' inputs in training. Its masks depend on seed,
    step, the text up to the token, layer and feature, so they are the same on every mesh; `forward_backward` then needs step.
    modules_to_save: patterns of modules trained in full, such as a new head. dtype: of the adapters; None: the weight's.
    base: "nf4" (4.5 bits) or "int8" (8.5 bits) quantizes the weights of the blocks' linear layers, targets or not; they are
    decoded for each product (QLoRA); embeddings, heads, norms, routers and stacked experts are not quantized. base_block:
    elements of a row that share a scale; a tensor rank's share of a row must be a multiple of it. seed: initial values depend
    on it, the name and the index, so they are the same on every mesh; for a model on meta call `mk.lora.init` once it has
    memory.
    A target `q_proj` keeps `q_proj.weight` and gains `q_proj.lora_A.weight` [rank, in], `q_proj.lora_B.weight` [out, rank].
    On the tensor axis a column() target replicates A and shards B like its weight; a row() target shards A and replicates B.
    A replicated matrix adds one all-reduce of its gradient per microbatch; activations cause no further traffic.
    Raises: PlanError for a pattern that matches nothing, and for what cannot be a target: experts, embeddings, heads that
    share a vocabulary, tied weights.
    Source: Hu et al. 2021; few bits: Dettmers et al. 2023 (QLoRA).
    """
    _refuse_numbers(model, rank, alpha, dropout)
    modules = dict(model.named_modules())
    named = plan or auto_plan(model)
    styles = match_table(named.tensor, modules, what="module")
    # Everything is resolved and checked before the first change: a refused call leaves the model as it was.
    chosen = _blocks_linears(named, modules, styles) if targets is None else _targets(targets, modules)
    saved_modules = match_names(modules_to_save, modules, what="module")
    _refuse(model, modules, chosen, saved_modules, styles)
    # Quantized are frozen layers only: a trained or shared weight needs its own values.
    codes = None if base is None else BlockCodes(codes=base, block=base_block)
    packed = {} if codes is None else _frozen(_blocks_linears(named, modules, styles), model, modules, saved_modules)
    lora = Lora(
        rank=rank,
        alpha=float(alpha),
        rslora=rslora,
        targets=tuple(chosen),
        saved=tuple(saved_modules),
        dropout=dropout,
        seed=seed,
        base=codes,
        packed={name: linear.in_features for name, linear in packed.items()},
    )
    dtypes = {name: dtype or modules[name].weight.dtype for name in chosen}
    # Everything is frozen first, so adapters added below are the only parameters that train, with modules_to_save.
    model.requires_grad_(False)
    for name in saved_modules:
        modules[name].requires_grad_(True)
    for linear in packed.values():
        assert codes is not None
        quantized_linear(linear, codes)
    for name in chosen:
        adapt(modules[name], lora, dtypes[name], name=name)
    set_lora(model, lora)
    if not any(modules[name].weight.is_meta for name in chosen):
        init(model, seed=seed)
    return None if plan is None else with_adapters(plan, model)


def with_adapters(plan: Plan, model: nn.Module) -> Plan:
    """The plan of a model without its adapters, with their styles."""
    modules = {name: child for name, child in model.named_modules() if name.rpartition(".")[2] not in (A, B)}
    chosen = {name for name, _ in adapted(model)}
    return replace(plan, tensor={**plan.tensor, **_adapter_styles(plan.tensor, modules, chosen)})


def without_adapters(model: nn.Module) -> nn.Module:
    """A copy without values and adapters."""
    copy = without_values(model)
    for _, layer in list(adapted(copy)):
        del layer._modules[A], layer._modules[B]
    set_lora(copy, None)
    return copy


def _refuse_numbers(model: nn.Module, rank: int, alpha: float, dropout: float) -> None:
    refuse_peft(model, "lora")
    if lora_of(model) is not None:
        raise PlanError("lora: the model has adapters already. Call merge_lora first, or build the model anew.")
    if rank < 1 or isinstance(rank, bool) or not alpha > 0:
        raise PlanError(f"lora: rank={rank} alpha={alpha}: rank is a whole number of at least 1, and alpha above 0.")
    if not 0 <= dropout < 1:
        raise PlanError(f"lora: dropout={dropout} is the share of features that are zeroed: at least 0 and below 1.")


@torch.no_grad()
def init(model: nn.Module, *, seed: int) -> nn.Module:
    """Initialise the adapters, in place, the same on every mesh; other parameters are not changed. Wire: nothing.

    A is uniform in +-1/sqrt(in), as PEFT's, and B is 0. For a model that was on meta, after `load_pretrained`.
    """
    copies = copies_of(model)
    for name, layer in adapted(model):
        for key in (A, B):
            adapter: AdapterLinear = layer._modules[key]
            full = f"{name}.{key}.weight"
            if adapter.weight.is_meta:
                raise PlanError(f"init_lora: {full!r} is still on meta. Call parallelize() or to_empty() first.")
            fill(adapter.weight, adapter.first_value, seed=seed, name=copies.get(full, full))
    return model


def _is_plain(module: nn.Module) -> bool:
    # A patched or overridden forward might not call the layer's product, and an adapter beside it would then compute
    # something else.
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _blocks_linears(plan: Plan, modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> list[str]:
    blocks = match_blocks(plan.blocks, modules)
    linears = [
        name
        for name, child in modules.items()
        if _is_plain(child)
        and any(name.startswith(f"{block}.") for block in blocks)
        and not (name in styles and styles[name].kind == "vocab")
    ]
    if not linears:
        raise PlanError("lora: the plan's blocks hold no linear layer. Name some as targets=(...).")
    return linears


def _frozen(
    names: Iterable[str], model: nn.Module, modules: Mapping[str, nn.Module], saved_modules: Iterable[str]
) -> dict[str, nn.Linear]:
    """The layers among `names` that are not trained and whose weight no other module shares."""
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    frozen: dict[str, nn.Linear] = {}
    for name in names:
        linear = modules[name]
        assert isinstance(linear, nn.Linear)
        if uses[id(linear.weight)] == 1 and not any(f"{name}.".startswith(f"{module}.") for module in saved_modules):
            frozen[name] = linear
    return frozen


def _targets(targets: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(targets, str):
        raise PlanError(f"lora: targets={targets!r} is one string; give a tuple of patterns, ({targets!r},).")
    names = match_names(targets, modules, what="module")
    if not names:
        raise PlanError("lora: targets=() adapts nothing. Name linear layers, or leave targets away.")
    return names


def _refuse(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    chosen: list[str],
    saved_modules: list[str],
    styles: Mapping[str, Style],
) -> None:
    uses: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        uses.setdefault(id(param), []).append(name)
    for name in chosen:
        child = modules[name]
        kind = styles[name].kind if name in styles else ""
        if kind == "experts":
            raise PlanError(
                f"lora: {name!r} are stacked experts, which take no adapters yet. Target the attention and shared experts."
            )
        if kind == "vocab":
            raise PlanError(
                f"lora: {name!r} is vocab() in the plan, and shared over the vocabulary. Name it in modules_to_save to train "
                "it whole, or leave it out of targets."
            )
        if not isinstance(child, nn.Linear) or not _is_plain(child):
            raise PlanError(
                f"lora: {name!r} is a {type(child).__name__}, and adapters are for nn.Linear. Leave it out of targets, or "
                "name it in modules_to_save to train it whole."
            )
        names = uses[id(child.weight)]
        if len(names) > 1:
            raise PlanError(f"lora: {' and '.join(names)} are one tied parameter. Leave {name!r} out of targets.")
    for name in saved_modules:
        inside = next((target for target in chosen if f"{target}.".startswith(f"{name}.")), None)
        if inside is not None:
            raise PlanError(f"lora: {inside!r} is a target and in modules_to_save ({name!r}). Keep one of the two.")
        params = {id(param) for param in modules[name].parameters()}
        if not params:
            raise PlanError(f"lora: modules_to_save names {name!r}, which holds no parameters.")
        outside = [other for key in params for other in uses[key] if not other.startswith(f"{name}.")]
        if outside:
            raise PlanError(
                f"lora: modules_to_save names {name!r}, which shares a tied parameter with {outside[0]!r}. PEFT would break "
                "the tie. Build the model with tie_word_embeddings=False."
            )


def _adapter_styles(
    tensor: Mapping[str, Style], modules: Mapping[str, nn.Module], chosen: set[str]
) -> dict[str, Style]:
    """The styles of A and B: under their targets' pattern if it matches only targets, else under each target's name."""
    styles: dict[str, Style] = {}
    for pattern, style in tensor.items():
        matched = set(match_table({pattern: replace(style, optional=True)}, modules, what="module"))
        adapted_here = [name for name in modules if name in matched & chosen]
        only_targets = matched <= chosen
        for name in [pattern] if adapted_here and only_targets else adapted_here:
            styles |= {f"{name}.{key}": inner for key, inner in _inner(style).items()}
    return styles


def _inner(style: Style) -> dict[str, Style]:
    """The styles of A and B inside of a layer of this style; `inner`: they get the layer's own input, gathered already."""
    # The replicated matrix multiplies with a shard on every rank, so its gradient is a sum over the axis, as per_head() says.
    replicated = replace(per_head(), optional=style.optional, inner=True)
    sharded = replace(style, inner=True)
    return {"column": {A: replicated, B: sharded}, "row": {A: sharded, B: replicated}}.get(
        style.kind, {A: sharded, B: sharded}
    )
