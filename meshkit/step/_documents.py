"""Packed rows: refused before a model runs on them that mixes the documents of a row."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core.code import is_ours
from meshkit.errors import PlanError
from meshkit.loss import IGNORED
from meshkit.parallel.documents_tried import mixes_documents
from meshkit.step._loss import Batch, model_inputs


@dataclass(eq=False)
class PackedRows:
    """Of a run. model: without values, as one device has it."""

    model: nn.Module
    _mixes: dict[bool, bool] = field(default_factory=dict)  # by whether it gets an attention_mask

    def refusal(self, what: str, batch: Batch) -> str:
        """Why `what` is refused on this batch, which the model is given by `model_inputs`; else empty.

        Documents are told by `position_ids` [B, T] that restart. Of those after the first of a row one must be learnt from.
        """
        positions, ids = batch.get("position_ids"), batch.get("input_ids")
        if not isinstance(positions, Tensor) or ids is None or positions.ndim != 2 or positions.shape != ids.shape:
            return ""
        if not self.mix(masked="attention_mask" in batch) or not _has_later_documents(positions, batch):
            return ""
        return (
            f"{what}: rows hold several documents (position_ids restart), and {type(self.model).__name__} mixes them: on "
            "random values, what it returns of a document depends on the one before it. Give each document a row of its own, "
            f"filled up by tokens of label {IGNORED}; or, if a row is meant as one text, leave position_ids away."
        )

    def refuse(self, what: str, batch: Batch) -> None:
        if refusal := self.refusal(what, batch):
            raise PlanError(refusal)

    def mix(self, *, masked: bool = False) -> bool:
        """Whether the model mixes the documents of a row. masked: given an attention_mask beside position_ids."""
        if all(_is_known(type(module)) for module in self.model.modules()):
            return False  # parity tests show that meshkit's do not
        if masked not in self._mixes:
            found = mixes_documents(self.model, _masked if masked else _plain)
            if found is None:
                warnings.warn(
                    f"{type(self.model).__name__} could not be tried on packed rows: see that it keeps documents apart where "
                    "position_ids restart.",
                    stacklevel=2,
                )
            self._mixes[masked] = bool(found)
        return self._mixes[masked]


def _is_known(kind: type) -> bool:
    return is_ours(kind) or kind.__module__.startswith("torch.nn.")


def _plain(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**model_inputs(model, batch))


def _masked(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """All tokens are real: with such a mask models of transformers do not look at positions."""
    return _plain(model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])})


def _has_later_documents(positions: Tensor, batch: Batch) -> bool:
    begins, real = positions[:, 1:] == 0, _real(batch)
    if real is not None:  # what is before it is no padding
        begins = begins & real[:, 1:] & real[:, :-1]
    return bool(((begins.cumsum(1) > 0) & _learnt(batch)[:, 1:]).any())


def _learnt(batch: Batch) -> Tensor:
    """[B, T]: tokens of examples, not of what fills a row up."""
    if "segment_ids" in batch:
        return batch["segment_ids"] > 0
    labels, ids, real = batch.get("labels"), batch["input_ids"], _real(batch)
    if labels is not None and labels.shape == ids.shape:
        return labels != IGNORED
    return torch.ones_like(ids, dtype=torch.bool) if real is None else real


def _real(batch: Batch) -> Tensor | None:
    mask = batch.get("attention_mask")
    return mask > 0 if mask is not None and mask.shape == batch["input_ids"].shape else None
