"""Patterns of attention: what a layer sees of the batch's mask. Read from transformers' mask functions, by their parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshkit.errors import PlanError
from meshkit.mask import Mask


@dataclass(frozen=True)
class Pattern:
    """causal: no keys after the query. window: at most so many tokens, the query included. chunk: only keys of the same
    chunk, of so many tokens."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    @property
    def cuts(self) -> bool:
        """Whether it hides tokens that the mask shows."""
        return self.window is not None or self.chunk is not None

    def of(self, mask: Mask, row: int | None) -> Mask:
        """What is left of the mask. row: tokens of a row, where rows are laid end to end."""
        return mask.windowed(self.window).chunked(self.chunk, row)

    def __str__(self) -> str:
        parts = (f"window={self.window}" * bool(self.window), f"chunk={self.chunk}" * bool(self.chunk))
        return " ".join(("causal" if self.causal else "full", *filter(None, parts)))


CAUSAL, FULL = Pattern(), Pattern(causal=False)

# A function made by one of these, by the names of what it closes over. "packed": documents, which the batch's mask has.
_PARTS = {
    "causal_mask_function": "causal",
    "bidirectional_mask_function": "full",
    "and_masks": "and",
    "or_masks": "or",
    "blockwise_overlay": "blocks",
    "sliding_window_overlay": "window",
    "chunked_overlay": "chunk",
    "packed_sequence_mask_function": "packed",
    "remap_positions_for_packed_sequence": "remapped",
}


def pattern_of(function: Callable[..., Any], *, padded: bool, packed: bool) -> Pattern:
    """The pattern of a mask function of transformers' masking_utils. padded, packed: whether the batch has an attention_mask,
    and position_ids by which documents may be packed.

    Raises: PlanError for functions that are none of theirs, which nothing is known of.
    """
    kind, closed = _kind(function)
    if kind == "and":
        return _joined([pattern_of(part, padded=padded, packed=packed) for part in closed["mask_functions"]])
    if kind == "remapped":
        inside = pattern_of(closed["mask_function"], padded=padded, packed=packed)
        if inside.chunk and packed:
            raise PlanError("chunked attention counts from the start of each document. Leave position_ids away.")
        return inside
    if kind == "window":
        return Pattern(causal=False, window=int(closed["sliding_window"]))
    if kind == "chunk":
        if padded:
            raise PlanError(
                "chunked attention counts from the first token that is no padding. Leave attention_mask away."
            )
        return Pattern(causal=False, chunk=int(closed["chunk_size"]))
    if kind in (None, "or", "blocks"):
        raise PlanError(f"its mask is made by {_said(function)}, which is no pattern that ranks can follow.")
    return CAUSAL if kind == "causal" else FULL


def of_all_tokens(function: Callable[..., Any], gather: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """The same mask function of transformers, of the tokens of all ranks, which are one document.

    gather: of ids of a rank's tokens [rows, tokens], those of all. Raises: PlanError, as `pattern_of`, and for chunks, which
    modules that run on all tokens are given none of.
    """
    from transformers import masking_utils

    kind, closed = _kind(function)
    if kind in ("and", "or"):
        join = masking_utils.and_masks if kind == "and" else masking_utils.or_masks
        joined: Callable[..., Any] = join(*(of_all_tokens(part, gather) for part in closed["mask_functions"]))
        return joined
    if kind == "blocks":
        blocks: Callable[..., Any] = masking_utils.blockwise_overlay(gather(closed["block_sequence_ids"]))
        return blocks
    if kind == "remapped":
        return of_all_tokens(closed["mask_function"], gather)
    if kind == "packed":
        one_document: Callable[..., Any] = masking_utils.bidirectional_mask_function
        return one_document
    if kind in ("causal", "full", "window"):
        return function
    raise PlanError(f"its mask is made by {_said(function)}, which is no pattern that ranks can follow.")


def _kind(function: Callable[..., Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Of which kind it is, and what it closes over."""
    name = function.__qualname__.partition(".")[0]
    kind = _PARTS.get(name) if function.__module__ == "transformers.masking_utils" else None
    return kind, inspect.getclosurevars(function).nonlocals


def _said(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__.partition('.')[0]}"


def _joined(parts: list[Pattern]) -> Pattern:
    joined = FULL
    for part in parts:
        windows = [each.window for each in (joined, part) if each.window]
        chunks = [each.chunk for each in (joined, part) if each.chunk]
        if len(chunks) == 2:
            raise PlanError("its mask has chunks of two sizes.")
        joined = Pattern(joined.causal or part.causal, min(windows, default=None), next(iter(chunks), None))
    # A window that reaches to both sides is another one.
    if joined.window and not joined.causal:
        raise PlanError("its window is one to both sides.")
    return joined
