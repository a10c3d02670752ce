"""Context parallelism on a module: `context_parallel` makes it attend over ranks, `split_batch` cuts its batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core import _torch
from meshkit.core.arguments import require
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.moe.real_tokens import only_first
from meshkit.moe.replay import has_known_place
from meshkit.parallel.context._cache import not_kept
from meshkit.parallel.context._doors import Doors
from meshkit.parallel.context._foreign import is_transformers
from meshkit.parallel.context._groups import costs_of
from meshkit.parallel.context._proof import Proofs
from meshkit.parallel.context._reading import Call, Reader
from meshkit.parallel.context._split import Context
from meshkit.parallel.context._split_mask import SplitMask
from meshkit.parallel.context._traffic import Shape
from meshkit.parallel.lengths import LengthCosts
from meshkit.plan import auto_plan, match_names
from meshkit.plan.match import listed, match_blocks
from meshkit.program import Program, example_of, without_values
from meshkit.strategy import ContextPolicy, IfUnproved, Sparse


def context_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    policy: ContextPolicy | None = None,
    attention: Iterable[str] = (),
    heads: tuple[int, int, int] | None = None,
    multiple: int = 1,
    dtype: torch.dtype | None = None,
    unproved: IfUnproved = "refuse",
    reading: tuple[Reader, Doors] | None = None,
) -> nn.Module:
    """Let the module's attention reach over the tokens of all ranks of one mesh axis, in place.

    The module is then run on what `split_batch(module, batch)` returns: this rank's tokens with their positions, labels
    and a `mask`. Three kinds of modules understand it:
    - a module whose forward takes `mask` and calls `mask.attend(q, k, v)` with it, as `meshkit.models` do;
    - a transformers model, through its registry of attention functions;
    - any other whose attention is F.scaled_dot_product_attention, of all tokens or causal. `attention` names the modules
      (patterns as in a plan) that call it; default: those that are found.
    Its forward must take `position_ids` where it uses positions: a rank's tokens are not 0, 1, 2, ...
    The model's program is read, and its first forward proves that nothing else mixes tokens.

    unproved: what becomes of a module that mixes tokens otherwise than by attention, such as a convolution: "refuse" raises,
    "replicate" gathers the tokens before it, lets every rank run it on all of them, and keeps the rank's own.
    reading: of the model before other axes split it, as `parallelize` has it; default: it is read here.
    policy: the scheme (ring, Ulysses, ...) and the order of tokens over ranks. heads: (query heads, key/value heads,
    head_dim) of one rank, from which "auto" computes what each scheme sends; default: the module's config. multiple: pad
    every rank's tokens to a multiple of it. dtype: of activations.
    Wire: each attention sends the scheme's messages; `explain` prints them.
    Raises: PlanError for a module whose tokens cannot be split, with the operation that mixes them, and for attention
    dropout, which would depend on the split.
    """
    require("context_parallel", "module", module, nn.Module)
    require("context_parallel", "mesh", mesh, DeviceMesh)
    require("context_parallel", "policy", policy, ContextPolicy, NoneType)
    attention = listed(attention, where="context_parallel", argument="attention")
    if mesh.ndim != 1:
        raise PlanError(f"context_parallel needs one mesh axis, but got {mesh.mesh_dim_names}. Pass mesh['cp'].")
    if context_of(module) is not None:
        raise PlanError(
            f"context_parallel: this {type(module).__name__} went through it already, and would split what is split. Call it "
            "once for each module."
        )
    policy = policy or ContextPolicy()
    reaches = policy.reaches(mesh.size())
    if reaches and _torch.is_compiled(module):
        raise PlanError(
            f"context_parallel: this {type(module).__name__} is compiled already, and what is proved before its first "
            "forward is no part of a graph. Call it on the model as it was, and compile what it returns."
        )
    reading = reading or plan_context(
        Program(without_values(module)), policy, size=mesh.size(), attention=attention, closed={}, unproved=unproved
    )
    reader, doors = reading
    config = getattr(module, "config", None)
    # Where attention stays on its rank, nothing asks for the shape; and a config may have none that is all layers'.
    config = config if reaches else None
    shape = attention_shape(config, heads, dtype or next((p.dtype for p in module.parameters()), torch.float32))
    # Calls of scaled_dot_product_attention never read positions, so position_ids cannot mark documents for them: causal over
    # the whole row. Nor can they where the model masks its scores itself.
    documents = not doors.intercepted and not doors.by_hand
    # Models of transformers look for documents where there is no attention_mask.
    padded_documents = not is_transformers(reader.program.model)
    module.__dict__["_context"] = Context(
        mesh,
        policy,
        shape,
        doors.window,
        multiple,
        attends=doors.attends,
        widths=frozenset(each.width for each in doors.mixers if each.width),
        documents=documents,
        padded_documents=padded_documents,
        own_masks=doors.by_hand,
        costs=length_costs(
            reader.program,
            policy,
            doors,
            heads,
            dtype or next((p.dtype for p in module.parameters()), torch.float32),
        )
        if policy.groups != "fixed" and mesh.size() > 1
        else None,
    )
    if not reaches:
        return module
    doors.open(module)
    if routers := [name for name, child in module.named_modules() if hasattr(child, "reduce_counts")]:
        foreign = next((name for name in routers if not has_known_place(reader.program.model, name)), None)
        patch_class(module, forward=_telling_padding(type(module).forward, foreign))
    # A forward without the mask would not fail: it would attend to this rank's tokens and train a wrong model.
    module.register_forward_pre_hook(_refuse_unsplit, with_kwargs=True)
    # Nor does a graph that somebody compiles around the module run what it proves.
    proofs: Callable[..., Any] = torch.compiler.disable(Proofs(reader, doors, _call(reader.program, policy)).__call__)
    module.register_forward_pre_hook(proofs, with_kwargs=True)
    return module


def plan_context(
    program: Program,
    policy: ContextPolicy,
    *,
    size: int,
    attention: Iterable[str],
    closed: Mapping[str, str],
    unproved: IfUnproved = "refuse",
    blocks: Sequence[str] | None = None,
    fits: Callable[[Doors], None] = lambda doors: None,
) -> tuple[Reader, Doors]:
    """How the model's attention is reached, proved where it is known what its forward takes. Changes nothing.

    closed: modules that are read as one operation. unproved: as in `context_parallel`. blocks: the
    repeated layers; default: those of `auto_plan`. fits: raises PlanError for a way that does not go with other choices;
    then others are looked for. Raises: PlanError, as that does.
    """
    policy.refuse_misfit(size)
    model = program.model
    named = tuple(match_names(attention, program.modules, what="module"))
    replicate = unproved == "replicate"
    if blocks is None and replicate and program.parameters:
        blocks = match_blocks(auto_plan(model).blocks, program.modules)
    reader = Reader(program, named, closed, replicate=replicate, blocks=tuple(blocks or ()))
    if not policy.reaches(size):
        return reader, Doors(intercepted=named)
    _refuse_dropout(model)
    call = _call(program, policy)
    if call is not None or named or reader.takes_mask:
        doors = Doors(intercepted=named) if call is None else reader.doors(call, fits)
        if policy.groups != "fixed":
            _refuse_in_groups(policy, doors, mask=reader.takes_mask or doors.registry)
        if policy.sparse is not None:
            _refuse_in_sparse(policy.sparse, doors)
        return reader, doors
    raise PlanError(
        f"context_parallel: {type(model).__name__}.forward takes no `mask` and no token ids by which it could be read, so "
        "its attention would see this rank's tokens only. Give parallelize(example=...), take a `mask` and call "
        'mask.attend(q, k, v), or name the modules that call F.scaled_dot_product_attention: attention=["layers.*.attn"].'
    )


def _refuse_in_groups(policy: ContextPolicy, doors: Doors, *, mask: bool) -> None:
    """Of a model that would compute something else, or that slowly, once a document leaves its row.

    mask: whether its forward takes one, or it attends by transformers' registry. Raises: PlanError.
    """
    why = ""
    if doors.mixers:
        why = (
            "the model has recurrent mixers, whose state goes along a document from rank to rank, and the pieces of a cut "
            "document alternate between its ranks: each adds messages one after another"
        )
    elif doors.whole:
        why = f"{next(iter(doors.whole))!r} runs on all tokens of a row (unproved='replicate'), and a document leaves its row"
    elif doors.counted or doors.cached:
        why = "a line of the model's own code is of all tokens of a row, and a document leaves its row"
    elif any(call.pattern.chunk for call in doors.calls or ()):
        why = "chunks of attention are counted from the start of a row, and a document leaves its row"
    elif doors.intercepted or not mask:
        why = (
            "calls of F.scaled_dot_product_attention follow no documents, so each row is one, and positions that they do not "
            "read are those of the row"
        )
    if why:
        raise PlanError(f"context groups={policy.groups!r}: {why}. Use groups='fixed'.")


def _refuse_in_sparse(sparse: Sparse, doors: Doors) -> None:
    """Of a model with layers that would not see chosen blocks, or whose states would go from rank to rank at every block.
    Raises: PlanError."""
    why = ""
    if doors.mixers:
        why = "the model has recurrent mixers, whose state would go to another rank at the end of each block"
    elif doors.by_hand:
        why = "the model's own code computes with all pairs of tokens"
    elif doors.whole:
        why = f"{next(iter(doors.whole))!r} runs on all tokens (unproved='replicate'), with all pairs where it attends"
    if why:
        raise PlanError(f"context sparse={type(sparse).__name__}: {why}. Leave sparse away.")


def refuse_whole_tokens(doors: Doors) -> None:
    """With sequence parallelism on tp. Raises: PlanError for modules that run on all tokens."""
    if doors.whole:
        name, whole = next(iter(doors.whole.items()))
        raise PlanError(
            f"context parallelism: {name!r} would run on all tokens (unproved='replicate'), but with sequence=True a rank of "
            f"tp has some of those of its rank of cp. Use sequence=False, or a mesh without cp. {whole.why}"
        )


def refuse_counted(doors: Doors, *, sequence: bool, compiled: bool, tp: int) -> None:
    """Raises: PlanError for lines that are of all tokens, and for attention to what a cache gathers, with what does not know
    them."""
    if not doors.counted and not doors.cached:
        return
    calls = [call for each in doors.counted.values() for call in each.calls]
    what = "{} at {} is of all tokens".format(*min(calls)) if calls else "the model attends by a mask of its own"
    line = f"context parallelism: {what}"
    if sequence:
        raise PlanError(
            f"{line}, but with sequence=True a rank of tp has some of those of its rank of cp. Use sequence=False, or a mesh "
            "without cp."
        )
    if compiled:
        reason = (
            "which is told by its line, and a compiled graph has none" if calls else "which no compiled graph knows"
        )
        raise PlanError(f"{line}, {reason}. Use compile=False, or a mesh without cp.")
    of_floats = any(not each.gather or each.dtype.is_floating_point for sent in doors.sent.values() for each in sent)
    if tp > 1 and (doors.by_hand or of_floats):
        raise PlanError(
            f"{line}, and it is not known how much of what is read of all tokens a rank of tp={tp} has. Use tp=1, or a "
            "mesh without cp."
        )


def _call(program: Program, policy: ContextPolicy) -> Call | None:
    """How a rank calls the model, as the program's example shows it; None for a model that takes no token ids."""
    example = program.example or example_of(program.model)
    if example is None:
        return None
    ids = next(
        (leaf for leaf in _torch.tree_leaves((example.args, example.kwargs)) if getattr(leaf, "ndim", 0) > 1), None
    )
    if ids is None:
        return None
    kwargs = {name: value for name, value in example.kwargs.items() if name not in ("mask", "attention_mask")}
    kwargs.setdefault("position_ids", torch.empty(ids.shape[:2], dtype=torch.int64, device="meta"))
    if program.example is None and is_transformers(program.model):
        kwargs |= not_kept(program.model)  # as `step.model_inputs` gives it with position_ids
    rows = ids.shape[0] if policy.whole else None
    return Call(example.args, kwargs, ids.shape[1], frozenset({"input_ids", *example.kwargs}), rows)


def split_batch(module: nn.Module, batch: dict[str, Tensor], *, mask: Mask | None = None) -> dict[str, Any]:
    """This rank's part of a batch, for a module that went through `context_parallel`.

    batch: input_ids [B, T], and any other tensors [B, T, ...]: labels (already shifted), position_ids, weights; and what
    `ContextPolicy.whole` names, which comes back as it is. All ranks of the axis give the same batch.
    mask: of T tokens for every row, or of B*T tokens, rows end to end; default: causal
    inside each document, and documents start where position_ids restart. Returns the same names with this rank's tokens,
    [B, L, ...], or [1, L, ...] where rows were laid end to end, plus position_ids and `mask`, a `SplitMask` to hand to the
    model; its `join` undoes the split. Padding has label -100 and is zero elsewhere. With an axis of one rank the batch
    comes back as it is.
    Raises: DataError for tensors that are not per token, and for batches that differ between the ranks.
    """
    context = context_of(module)
    if context is None:
        raise PlanError(f"split_batch: {type(module).__name__} did not go through context_parallel. Call that first.")
    if not context.policy.reaches(context.axis.size()):
        if mask is None:
            return dict(batch)
        if "mask" not in inspect.signature(module.forward).parameters:
            raise PlanError(
                f"split_batch: {type(module).__name__}.forward takes no `mask`, so on one rank of cp it would not be "
                "followed. Give the model the mask in its own way, or leave it away."
            )
        return {**batch, "mask": mask}
    return context.split(batch, mask)


def context_of(module: nn.Module) -> Context | None:
    """The module's `Context`, if it went through `context_parallel`; None for another."""
    return module.__dict__.get("_context")


def length_costs(
    program: Program, policy: ContextPolicy, doors: Doors, heads: tuple[int, int, int] | None, dtype: torch.dtype
) -> LengthCosts:
    """What dynamic groups count with: of one layer of the whole model, since tp divides all of it alike.

    heads: of a rank, for a model whose config has none.
    """
    config = getattr(program.model, "config", None)
    shape = attention_shape(config, None if _told(config, "num_attention_heads") else heads, dtype)
    layers = len(doors.calls or ()) or _told(config, "num_hidden_layers") or 1
    chosen = _told(config, "num_experts_per_tok") or 1
    return costs_of(program.model, policy, shape, layers=layers, chosen=chosen)


def attention_shape(config: Any, heads: tuple[int, int, int] | None, dtype: torch.dtype) -> Shape:
    """The shape of one rank's attention layer: from `heads`, else from the config; one head where both are silent."""
    if heads is None:
        query = _told(config, "num_attention_heads") or 1
        per_head = _told(config, "head_dim") or (_told(config, "hidden_size") or query) // query
        heads = (query, _told(config, "num_key_value_heads") or query, per_head)
    return Shape(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=heads[2],
        itemsize=dtype.itemsize,
        sum_itemsize=torch.promote_types(dtype, torch.float32).itemsize,
    )


def _told(config: Any, name: str) -> int | None:
    try:
        value: int | None = getattr(config, name, None)
    except Exception:  # transformers' own, of a config whose layers differ in it
        return None
    return value


def _telling_padding(forward: Callable[..., Any], foreign: str | None) -> Callable[..., Any]:
    """The forward, and its routers can ask which of this rank's tokens fill it up. foreign: one that could not know where
    they are."""

    @functools.wraps(forward)
    def forward_with_padding(self: nn.Module, *args: Any, mask: Any, **kwargs: Any) -> Any:
        if not isinstance(mask, SplitMask):  # generation's ranks see all tokens
            return forward(self, *args, mask=mask, **kwargs)
        if foreign is not None and mask.fills_up:
            ranks = len(mask.layout.runs)
            raise PlanError(
                f"context parallelism: rows of {mask.row_tokens} tokens leave padding on the {ranks} ranks of cp, and "
                f"the router {foreign!r} counts what your own code hands it, in an order that is not known. Pad rows to a "
                "multiple of 2 x cp x tp tokens, with labels of -100, or use cp=1."
            )
        with only_first(mask.real_tokens, mask.tokens):
            return forward(self, *args, mask=mask, **kwargs)

    return forward_with_padding


def _refuse_unsplit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("attention_mask") is not None:
        raise PlanError(
            f"context parallelism: {type(module).__name__} was given an attention_mask, which is about this rank's tokens "
            "only. Describe it as a meshkit.Mask to split_batch; padding needs none if it comes last and its labels are -100."
        )
    if not hasattr(kwargs.get("mask"), "attend"):  # of a split batch, or of generation, whose ranks see all tokens
        raise PlanError(
            f"context parallelism: {type(module).__name__} was called without `mask=` of a split batch, and would attend to "
            "this rank's tokens only. Call batch = mk.split_batch(model, batch), and hand on its mask."
        )


def _refuse_dropout(module: nn.Module) -> None:
    rate = getattr(getattr(module, "config", None), "attention_dropout", 0.0) or 0.0
    if rate:
        raise PlanError(
            f"context parallelism: attention_dropout={rate}, but no kernel draws dropout by the place in the sequence, so it "
            "would depend on the split. Set attention_dropout=0."
        )
