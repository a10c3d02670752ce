"""Packed rows: refused before a model runs on them that mixes the documents of a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshkit.core.code import is_ours
from meshkit.errors import PlanError
from meshkit.loss import IGNORED
from meshkit.mesh import Mesh
from meshkit.parallel.documents_tried import Mixing, mixes_documents
from meshkit.step._loss import Batch, model_inputs

Masked = Literal["none", "ones", "numbers"]


@dataclass(eq=False)
class PackedRows:
    """Of a run. model: without values, as one device has it."""

    model: nn.Module
    _mixes: dict[Masked, Mixing] = field(default_factory=dict)  # by the attention_mask that it gets

    def refusal(self, what: str, batch: Batch) -> str:
        """Why `what` is refused on this batch, which the model is given by `model_inputs`; else empty.

        Documents are told by `position_ids` [B, T] that restart. A mask of the batch that is not of [B, T] says by itself who
        sees whom, as does the entry `mask`.
        """
        if not _may_be_packed(batch) or (mixing := self.mixing(_masked(batch))) == "no":
            return ""
        if "attention_mask" in batch and bool((batch["attention_mask"] > 1).any()):
            mixing = self.mixing("numbers")
        if mixing == "no" or not _sees_others(batch, mixing):
            return ""
        said = f"{what}: rows hold several documents (position_ids restart), and {type(self.model).__name__} mixes them: on "
        if mixing == "earlier":
            return said + (
                "random values, what it returns of a document depends on the one before it. Give each document a row of its "
                f"own, filled up by tokens of label {IGNORED} (a pair is two documents); or, if a row is meant as one text, "
                "leave position_ids away."
            )
        return said + (
            "random values, what it returns of a document depends on what comes after it, also where that fills the row up. "
            "Give rows of one document and one length, or an attention_mask."
        )

    def refuse(self, what: str, batch: Batch, mesh: Mesh) -> None:
        """On every rank, if one has such rows. Every rank must call it. Wire: nothing, for a model that keeps them apart."""
        if not _may_be_packed(batch) or self.mixing(_masked(batch)) == "no":
            return
        refusal = self.refusal(what, batch)
        mesh.agreement.meet(what, facts={"packed rows": refusal or "none"})
        if refusal:
            raise PlanError(refusal)

    def mixing(self, masked: Masked = "none") -> Mixing:
        """masked: by an attention_mask beside position_ids: of ones, or of the numbers of documents."""
        if all(_is_known(type(module)) for module in self.model.modules()):
            return "no"  # parity tests show that meshkit's do not
        if masked not in self._mixes:
            found = mixes_documents(self.model, _CALLS[masked])
            if found is None:
                warnings.warn(
                    f"{type(self.model).__name__} could not be tried on packed rows: see that it keeps documents apart where "
                    "position_ids restart.",
                    stacklevel=2,
                )
            self._mixes[masked] = found or "no"
        return self._mixes[masked]


def _is_known(kind: type) -> bool:
    return is_ours(kind) or kind.__module__.startswith("torch.nn.")


def _plain(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**model_inputs(model, batch))


def _with_ones(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """All tokens are real: with such a mask models of transformers do not look at positions."""
    return _plain(model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])})


def _with_numbers(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return _plain(model, {**batch, "attention_mask": (batch["position_ids"] == 0).cumsum(1)})


_CALLS: dict[Masked, Callable[..., Any]] = {"none": _plain, "ones": _with_ones, "numbers": _with_numbers}


def _masked(batch: Batch) -> Masked:
    """By what entries there are, so that all ranks say the same."""
    return "ones" if "attention_mask" in batch else "none"


def _may_be_packed(batch: Batch) -> bool:
    """By what entries there are, so that all ranks say the same."""
    positions, ids, mask = (batch.get(name) for name in ("position_ids", "input_ids", "attention_mask"))
    if not isinstance(positions, Tensor) or not isinstance(ids, Tensor) or "mask" in batch:
        return False
    return positions.ndim == ids.ndim == 2 and (mask is None or mask.ndim == 2)


def _sees_others(batch: Batch, mixing: Mixing) -> bool:
    """Whether a token that is learnt sees one that is not of its document."""
    positions, real = batch["position_ids"], batch.get("attention_mask")
    begins = positions.diff(dim=1) <= 0
    if real is not None:
        # At 0, for beside a mask positions may jump; and what is before it is no padding.
        begins = (positions[:, 1:] == 0) & (real[:, 1:] > 0) & (real[:, :-1] > 0)
    learnt = _learnt(batch)
    if mixing == "later":
        return bool((begins.any(1) & learnt.any(1)).any())
    return bool(((begins.cumsum(1) > 0) & learnt[:, 1:]).any())


def _learnt(batch: Batch) -> Tensor:
    """[B, T]: tokens of examples, not of what fills a row up."""
    if "segment_ids" in batch:
        return batch["segment_ids"] > 0
    labels, ids, real = (batch.get(name) for name in ("labels", "input_ids", "attention_mask"))
    assert ids is not None
    if labels is not None and labels.shape == ids.shape:
        return labels != IGNORED
    return torch.ones_like(ids, dtype=torch.bool) if real is None else real > 0
