"""Reading a model for context parallelism: where it attends and what each layer sees; the proof that nothing else mixes tokens.

Two programs are read on a row of few tokens: the model's own, and that of a rank, which holds some of the tokens and attends
through us. In both, attention is one operation. The rest must treat each token by itself, with its own position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core import _torch, noting
from meshkit.core.patch_class import patch_class
from meshkit.errors import PlanError
from meshkit.parallel.context._foreign import (
    Interception,
    follow_patterns,
    is_causal_by,
    is_transformers,
    refuse_unknown,
    use_registry,
    with_attention_intercepted,
    with_mask_set,
)
from meshkit.parallel.context._pattern import CAUSAL, FULL, Pattern, pattern_of
from meshkit.program import Held, Operation, Program, ReadingError, Trace, live, prove, tensors, trace, without_values

_READ_NAME = "meshkit_read"
_ATTEND = "context_attend"
# The tokens of two ranks, none of which are in a row with the others: a position that a rank counts for itself is another.
_TOKENS = ((0, 1, 2, 3, 12, 13, 14, 15), (4, 5, 6, 7, 8, 9, 10, 11))


@dataclass(frozen=True)
class Doors:
    """How a model's attention is reached. registry: transformers'. intercepted: modules whose calls of
    scaled_dot_product_attention are ours. patterns: what the attention of modules of the registry sees. Neither: the forward
    takes `mask`."""

    registry: bool = False
    intercepted: tuple[str, ...] = ()
    patterns: Mapping[str, Pattern] = field(default_factory=dict)

    def open(self, module: nn.Module) -> None:
        """Let the module's attention follow the split mask that its forward is given."""
        modules = dict(module.named_modules())
        for name in self.intercepted:
            patch_class(modules[name], forward=with_attention_intercepted(type(modules[name]).forward))
        if self.registry:
            use_registry(module)
            follow_patterns(module, self.patterns)
        takes = {"mask", "position_ids"} <= inspect.signature(module.forward).parameters.keys()
        if self.registry or self.intercepted or not takes:
            hand_on = self.registry and bool(getattr(module, "_supports_attention_backend", False))
            patch_class(module, forward=with_mask_set(type(module).forward, hand_on=hand_on))


@dataclass(frozen=True)
class Call:
    """A call of a rank's forward, less the mask; dim 1 of tensors that have `tokens` there is the tokens.

    given: names of the batch before it was split. position_ids that it has not are those of the tokens.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tokens: int
    given: frozenset[str] = frozenset({"input_ids"})

    def of(self, tokens: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the same kind for one row of so many tokens."""

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[1] != self.tokens:
                return leaf
            return torch.empty((1, tokens, *leaf.shape[2:]), dtype=leaf.dtype, device="meta")

        args, kwargs = _torch.tree_map(resized, (tuple(self.args), dict(self.kwargs)))
        return args, kwargs

    def alone(self, tokens: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the single-device model, of all tokens."""
        args, kwargs = self.of(tokens)
        if "position_ids" not in self.given:
            kwargs.pop("position_ids", None)
        if "attention_mask" in self.given:
            kwargs["attention_mask"] = torch.empty((1, tokens), dtype=torch.int64, device="meta")
        return args, kwargs


class ReadMask:
    """Stands for a split mask while a program is read: its attention is one operation."""

    def __init__(self, pattern: Pattern | None = None) -> None:
        self.pattern = pattern

    def windowed(self, window: int | None) -> ReadMask:
        return self if window is None else ReadMask(Pattern(causal=False, window=window))

    def following(self, pattern: Pattern, who: str) -> ReadMask:
        return ReadMask(pattern)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        note = noting.reader.get()
        out = _like_attention(q, k, v, sinks)
        if note is None:  # inside of another operation
            return out
        choices = {"scale": scale or q.shape[3] ** -0.5, "softcap": softcap or 0.0, "pattern": self.pattern}
        return note(_ATTEND, _like_attention, (q, k, v, sinks), choices)


def _like_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **choices: Any) -> Tensor:
    """[B, T, H, E], with a gradient where attention's result has one."""
    out = q[..., :1] * v.repeat_interleave(q.shape[2] // v.shape[2], 2) * k.sum()
    return out if sinks is None else out * sinks.sum()


# ------------------------------------------------------------------------------------------- the single-device model


def _describe(
    mask_function: Callable[..., Any], attention_mask: Tensor | None = None, *, packed: bool, **kwargs: Any
) -> _Described:
    """In place of transformers' own, which make the mask's tensor."""
    return _Described(pattern_of(mask_function, padded=attention_mask is not None, packed=packed))


@dataclass(frozen=True)
class _Described:
    """Stands for an attention mask."""

    pattern: Pattern

    def to(self, *args: Any, **kwargs: Any) -> _Described:
        return self


def _read_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Described | Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    refuse_unknown(type(module).__name__, kwargs)
    if attention_mask is None:
        pattern = CAUSAL if is_causal_by(module, is_causal) else FULL
    elif isinstance(attention_mask, _Described):
        pattern = attention_mask.pattern
    else:
        raise PlanError(f"{type(module).__name__} makes an attention mask of its own. Describe it as a meshkit.Mask.")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sinks = s_aux if sinks is None else sinks
    return ReadMask(pattern).attend(q, k, v, scale=scaling, softcap=softcap, sinks=sinks), None


def _read_dot_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None or dropout_p or query.ndim != 4:
        what = "attn_mask" if attn_mask is not None else f"dropout_p={dropout_p}" if dropout_p else f"{query.ndim} dims"
        raise PlanError(
            f"scaled_dot_product_attention with {what} cannot be split. Use is_causal, no dropout, and "
            "[rows, heads, tokens, head_dim]; or take a `mask` and call mask.attend(q, k, v)."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return ReadMask(CAUSAL if is_causal else FULL).attend(q, k, v, scale=scale).transpose(1, 2)


def _with_calls_read(forward: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with Interception(_read_dot_products):
            return forward(self, *args, **kwargs)

    return read


@dataclass(frozen=True)
class Reader:
    """Reads a model for its attention. named: modules that the user named, else all that are found. closed: see `trace`."""

    program: Program
    named: tuple[str, ...] = ()
    closed: Mapping[str, str] = field(default_factory=dict)

    @property
    def takes_mask(self) -> bool:
        """Whether the forward takes a `mask` to attend with, and no other way is asked for."""
        model = self.program.model
        return not is_transformers(model) and not self.named and "mask" in inspect.signature(model.forward).parameters

    def doors(self, call: Call) -> Doors:
        """How the model's attention is reached, proved on this call.

        Raises: PlanError for a model that cannot be split by its tokens.
        """
        with self._explained():
            return self._doors(call)

    def _doors(self, call: Call) -> Doors:
        for registry in (True, False) if is_transformers(self.program.model) and not self.named else (False,):
            try:
                full = self._alone(call, sum(map(len, _TOKENS)), registry=registry)
            except ReadingError as error:
                # It adds the mask to scores that it computes itself.
                if registry and not isinstance(error.__cause__, PlanError):
                    continue
                raise
            places = tuple(dict.fromkeys(name for name, _ in _attentions(full)))
            if self.takes_mask:
                doors = Doors()
            elif registry:
                doors = Doors(registry=True, patterns=_patterns(full))
            else:
                doors = Doors(intercepted=self.named or places)
            if places or not registry:
                break
        self._prove(full, doors, call, _TOKENS)
        return doors

    def prove(self, doors: Doors, call: Call) -> None:
        """Raises: PlanError unless the model follows its split on another call too."""
        with self._explained():
            self._prove_again(doors, call)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PlanError as error:
            raise PlanError(
                f"context parallelism: {type(self.program.model).__name__} cannot be split by its tokens. {error} Use cp=1, or "
                "leave it to the other axes."
            ) from error

    def _prove_again(self, doors: Doors, call: Call) -> None:
        full = self._alone(call, sum(map(len, _TOKENS)), registry=doors.registry)
        if doors.registry and (found := _patterns(full)) != doors.patterns:
            name = next(each for each in {**found, **doors.patterns} if found.get(each) != doors.patterns.get(each))
            raise PlanError(
                f"{name} attends by {found.get(name)} on this batch, and by {doors.patterns.get(name)} on the example by which "
                "it was read. Give parallelize(example=...) with the arguments of the batch."
            )
        self._prove(full, doors, call, _TOKENS)

    def refuse_other_programs(self, doors: Doors, call: Call, *, tokens: int, lengths: Iterable[int]) -> None:
        """Raises: PlanError if the model runs other operations on so many tokens than on the few that it was proved on."""
        few = sum(map(len, _TOKENS))
        pairs = [(lambda count: self._alone(call, count, registry=doors.registry), few, tokens)]
        pairs += [(lambda count: self._on_rank(doors, call, count), len(_TOKENS[0]), length) for length in lengths]
        for read, proved, count in pairs:
            for a, b in zip_longest(_computing(read(proved)), _computing(read(count))):
                if a is None or b is None or a.name != b.name:
                    raise PlanError(
                        f"context parallelism: {type(self.program.model).__name__} cannot be split by its tokens. {b or a}: it is "
                        f"run on {count if b else proved} tokens and not on {proved if b else count}, so what runs depends on how "
                        "many tokens there are. Use cp=1, or leave it to the other axes."
                    )

    def _alone(self, call: Call, tokens: int, *, registry: bool) -> Trace:
        """The single-device model's program."""
        model = without_values(self.program.model)
        args, kwargs = call.alone(tokens)
        if self.takes_mask:
            kwargs["mask"] = ReadMask()
        elif registry:
            from transformers import AttentionMaskInterface

            AttentionMaskInterface.register(_READ_NAME, partial(_describe, packed="position_ids" in call.given))
            use_registry(model, _READ_NAME, _read_attention)
        else:
            modules = dict(model.named_modules())
            for name in self.named or ("",):
                patch_class(modules[name], forward=_with_calls_read(type(modules[name]).forward))
        return self._with_values(live(trace(model, args, kwargs, closed=self.closed)))

    def _on_rank(self, doors: Doors, call: Call, tokens: int) -> Trace:
        model = without_values(self.program.model)
        doors.open(model)
        args, kwargs = call.of(tokens)
        return self._with_values(live(trace(model, args, {**kwargs, "mask": ReadMask()}, closed=self.closed)))

    def _with_values(self, trace: Trace) -> Trace:
        """The trace with the values of whole numbers that the model keeps: positions, and kinds of tokens."""
        values = {
            f"buffer {name}": buffer
            for name, buffer in self.program.model.named_buffers()
            if not buffer.is_floating_point() and not buffer.is_complex() and not buffer.is_meta
        }
        storages = [
            replace(kept, value=values[kept.source].detach().cpu().flatten())
            if kept.source in values and values[kept.source].numel() == kept.size
            else kept
            for kept in trace.storages
        ]
        return replace(trace, storages=tuple(storages))

    def _prove(self, full: Trace, doors: Doors, call: Call, tokens: tuple[tuple[int, ...], ...]) -> None:
        ranks = [_with_positions(self._on_rank(doors, call, len(own)), call, own) for own in tokens]
        held = []
        for trace_of_rank, own in zip(ranks, tokens, strict=True):
            of_inputs = {
                kept.source: Held("varying", 1, own)
                for kept in trace_of_rank.storages
                if kept.source.startswith("input ") and len(kept.shape) > 1 and kept.shape[1] == len(own)
            }
            # The gradients of parameters are summed over the axis, as over data ranks.
            params = {f"parameter {name}": Held("replicated") for name in self.program.parameters}
            held.append({**params, **of_inputs})
        prove(full, ranks, held, tokens=tokens)


def _with_positions(trace: Trace, call: Call, tokens: tuple[int, ...]) -> Trace:
    """The trace with the values of positions that the batch did not have: they are the numbers of the tokens."""
    if "position_ids" in call.given:
        return trace
    own = torch.tensor(tokens)
    storages = [replace(kept, value=own) if kept.source == "input position_ids" else kept for kept in trace.storages]
    return replace(trace, storages=tuple(storages))


def _computing(trace: Trace) -> list[Operation]:
    """Less those that only look at memory in another way, or copy it, which may depend on strides."""
    kept = []
    for operation in trace.operations:
        read = {ref.storage for ref in tensors((operation.args, operation.kwargs))}
        if operation.name.startswith("aten.clone") or any(ref.storage in read for ref in tensors(operation.outputs)):
            continue
        kept.append(operation)
    return kept


def _attentions(trace: Trace) -> list[tuple[str, Operation]]:
    """(module that runs it, attention) of each."""
    return [(trace.calls[each.call].name, each) for each in trace.operations if each.name == _ATTEND]


def _patterns(trace: Trace) -> dict[str, Pattern]:
    patterns: dict[str, Pattern] = {}
    for name, operation in _attentions(trace):
        pattern = operation.kwargs["pattern"]
        if patterns.setdefault(name, pattern) != pattern:
            raise PlanError(f"{name}: it attends by {patterns[name]} and by {pattern}, so no pattern is the module's.")
    return patterns
