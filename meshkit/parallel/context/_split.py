"""Splitting a batch for context parallelism: from whole sequences to this rank's tokens, positions and labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.core.to_device import to_device
from meshkit.errors import DataError, PlanError
from meshkit.loss import IGNORED
from meshkit.mask import Mask
from meshkit.mesh import HostRanks, host_ranks
from meshkit.parallel.context._groups import microbatches_of, plan_step
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._scheme import Choice, choose_for_rows
from meshkit.parallel.context._split_mask import SplitMask, token_index
from meshkit.parallel.context._traffic import Shape
from meshkit.parallel.lengths import LengthCosts, LengthPlan, Pace
from meshkit.strategy import ContextPolicy


class Unpadded(dict[str, Any]):
    """A part of a batch without its attention_mask, which its `mask` follows: a loss that asks for one is told."""

    def __missing__(self, name: str) -> Any:
        self._refuse(name)
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._refuse(name)
        return super().get(name, default)

    def _refuse(self, name: str) -> None:
        if name == "attention_mask":
            raise DataError(
                "the loss reads attention_mask, and with cp a part of a batch has none: the model sees it in `mask`. Give "
                "the model model_inputs(model, part), and a loss that weighs tokens by it a copy by another name."
            )


@dataclass(eq=False)
class Context:
    """How a model's batches are split over `cp`. Made by `context_parallel`.

    shape: an attention layer, from which the bytes of each scheme follow. window: the sliding window of all layers, by which
    their work is balanced; each cuts what it sees by itself. multiple: every rank's tokens are padded to a multiple of it
    (tp, with sequence parallelism).
    """

    axis: DeviceMesh
    policy: ContextPolicy
    shape: Shape
    window: int | None = None
    multiple: int = 1
    attends: bool = True  # some layer has attention
    widths: frozenset[int] = frozenset()  # of short convolutions of recurrent mixers
    documents: bool = True  # a position that restarts begins a document
    padded_documents: bool = True  # also in a batch with an attention_mask
    own_masks: bool = False  # the model's own code masks its scores
    costs: LengthCosts | None = None  # by which dynamic groups are planned
    choice: Choice | None = None  # of the last batch
    plan: LengthPlan | None = None  # of the last step, with dynamic groups
    hosts: HostRanks = field(init=False)  # of cp; made here and not in the first batch, for to make it is a collective

    def __post_init__(self) -> None:
        self.hosts = host_ranks(self.axis.get_group())

    @property
    def rank(self) -> int:
        return self.axis.get_local_rank()

    def split(self, batch: dict[str, Tensor], mask: Mask | None = None) -> dict[str, Tensor | SplitMask]:
        """See `split_batch`."""
        if mask is not None and self.own_masks:
            raise PlanError(
                "split_batch: a mask was given, but the model attends by hand, with a mask that its own code makes. Leave "
                "the mask away, or call F.scaled_dot_product_attention or mask.attend(q, k, v)."
            )
        whole = {name: batch[name] for name in self.policy.whole if name in batch}
        batch = {name: tensor for name, tensor in batch.items() if name not in whole}
        rows, tokens = _refuse_odd_shapes(batch)
        mask = _mask_of(batch, rows, tokens, mask, documents=self.documents and self._by_position(batch))
        given = frozenset(batch)
        if "attention_mask" in batch:
            mask = _without_padding(mask, batch, rows, tokens)
            batch = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        self.choice, alike = choose_for_rows(
            mask,
            rows,
            tokens,
            self.axis.size(),
            self.policy,
            self.shape,
            multiple=self.multiple,
            window=self.window,
            attends=self.attends,
        )
        stream = alike == 1
        layout = self.choice.layout
        _refuse_odd_whole(whole, layout, rows=rows, stream=stream)
        self._refuse_different_batches(batch["input_ids"], layout)
        tensors = dict(batch)
        if "position_ids" not in tensors:
            tensors["position_ids"] = torch.arange(tokens, device=batch["input_ids"].device).expand(rows, tokens)
        index, count = token_index(layout, self.rank)
        if stream:
            tensors = {name: rearrange(tensor, "b t ... -> 1 (b t) ...") for name, tensor in tensors.items()}
        split: dict[str, Tensor | SplitMask] = {**whole, **_shards(tensors, index, count)}
        split_mask = SplitMask(
            layout, self.axis, rows=rows if stream else 0, given=given, batch_rows=rows if whole else None
        )
        if self.widths:
            split_mask.plan_mixers(self.widths)
        return _part({**split, "mask": split_mask}, given)

    def split_step(
        self, batch: dict[str, Tensor], microbatches: int, mask: Mask | None, *, pace: Pace
    ) -> Iterator[dict[str, Tensor | SplitMask] | None]:
        """This rank's part of each microbatch of a step with dynamic groups; None for one that no document was left for.

        mask: of T tokens for every row, or of all rows end to end. A part is one row, its documents end to end, in the order
        of the batch. Wire: as `split_batch`, for each part. Raises: as that; DataError where tokens_per_rank is too little.
        """
        assert self.costs is not None and self.policy.groups != "fixed"
        if not len(batch["input_ids"]):
            yield from [None] * microbatches
            return
        rows, tokens = _refuse_odd_shapes(batch)
        mask = _mask_of(batch, rows, tokens, mask, documents=self._by_position(batch))
        given = frozenset(batch)
        if "attention_mask" in batch:
            mask = _without_padding(mask, batch, rows, tokens)
            batch = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        stream = mask if mask.tokens == rows * tokens else Mask.joined([mask] * rows)
        self.plan, documents = plan_step(
            stream,
            self.axis.size(),
            microbatches,
            self.policy.groups,
            self.policy,
            self.costs,
            pace=pace,
            window=self.window,
        )
        assert self.plan.microbatches == microbatches, "FSDP reduces gradients after the last of them"
        tensors = dict(batch)
        if "position_ids" not in tensors:
            tensors["position_ids"] = torch.arange(tokens, device=batch["input_ids"].device).expand(rows, tokens)
        flat = {name: rearrange(tensor, "b t ... -> 1 (b t) ...") for name, tensor in tensors.items()}
        for microbatch in microbatches_of(stream, self.plan, documents, multiple=self.multiple):
            if microbatch is None:
                yield None
                continue
            layout = microbatch.layout
            places = torch.cat([torch.arange(first, after) for first, after in microbatch.documents])
            self._refuse_different_batches(flat["input_ids"][0, to_device(places, flat["input_ids"].device)], layout)
            own, count = token_index(layout, self.rank)
            split_mask = SplitMask(layout, self.axis, given=given, has_rows=False)
            yield _part({**_shards(flat, places[own], count), "mask": split_mask}, given)

    def _by_position(self, batch: dict[str, Tensor]) -> bool:
        return self.padded_documents or "attention_mask" not in batch

    def _refuse_different_batches(self, ids: Tensor, layout: Layout) -> None:
        """Raise if the ranks of cp hold different batches: their plans would differ, and their messages would not match.

        Wire: two numbers between the hosts of cp, who wait for no device.
        """
        content = torch.cat([ids.flatten().cpu(), layout.table(), torch.tensor(ids.shape)])
        # Weighted by place, so that a permutation of the tokens is another batch; int64 may wrap round, on all ranks alike.
        digest = (content * torch.arange(1, content.numel() + 1)).sum() + 1_000_003 * content.numel()
        own = int(digest)
        if self.hosts.all_reduce((own, own), _extremes) != (own, own):
            raise DataError(
                f"split_batch: the ranks of cp={self.axis.size()} were given different batches. Ranks that differ only in "
                "cp read the same rows, with the same positions and mask: load them by mesh.data_rank of mesh.data_ranks."
            )


def _extremes(pairs: list[tuple[int, int]]) -> tuple[int, int]:
    return min(low for low, _ in pairs), max(high for _, high in pairs)


def _refuse_odd_shapes(batch: dict[str, Tensor]) -> tuple[int, int]:
    if "input_ids" not in batch or batch["input_ids"].ndim != 2:
        raise DataError("split_batch: the batch needs input_ids [rows, tokens], from which the split is made.")
    rows, tokens = batch["input_ids"].shape
    for name, tensor in batch.items():
        if tuple(tensor.shape[:2]) != (rows, tokens):
            raise DataError(
                f"split_batch: {name!r} has shape {tuple(tensor.shape)}, but input_ids are {rows} rows of {tokens} tokens. "
                "Tensors of a split batch hold one entry for each token. What has none and every rank needs, such as images, "
                f"is named: ContextPolicy(whole=({name!r},))."
            )
    if not rows or not tokens:
        raise DataError(f"split_batch: {rows} rows of {tokens} tokens are nothing to split.")
    return rows, tokens


def _refuse_odd_whole(whole: dict[str, Tensor], layout: Layout, *, rows: int, stream: bool) -> None:
    for name, tensor in whole.items():
        if stream and rows > 1:
            raise DataError(
                f"split_batch: {name!r} is whole, row by row, but rows with masks of their own are laid end to end. Give "
                "batches of one row, or rows with one mask."
            )
        if tensor.ndim > 1 and tensor.shape[1] in layout.lengths:
            # A model's program is read with other numbers of tokens, which are told by their number.
            raise DataError(
                f"split_batch: {name!r} is whole and has {tensor.shape[1]} entries in a row, as many as a rank has tokens. "
                "Pad it by one."
            )


def _mask_of(batch: dict[str, Tensor], rows: int, tokens: int, mask: Mask | None, *, documents: bool) -> Mask:
    """The mask of the batch: of one row if all rows are alike, else of all rows end to end."""
    if mask is not None:
        mask.refuse_misfit(rows, tokens)
        return mask
    if "position_ids" not in batch or not documents:
        return Mask.causal(tokens)
    mask = Mask.from_positions(batch["position_ids"])
    return Mask.causal(tokens) if mask == Mask.documents([tokens] * rows) else mask


def _part(part: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    return Unpadded(part) if "attention_mask" in given else part


def _without_padding(mask: Mask, batch: dict[str, Tensor], rows: int, tokens: int) -> Mask:
    """The mask less the keys that attention_mask [rows, tokens] hides; of all rows end to end, unless it hides none."""
    shown = batch["attention_mask"].bool().cpu()
    if shown.shape != (rows, tokens):
        raise DataError(
            f"split_batch: attention_mask has shape {tuple(shown.shape)}. One of [rows, tokens] says which tokens are "
            "padding; describe any other as a meshkit.Mask."
        )
    if shown.all():
        return mask
    before = (
        shown.cumsum(1) == 0
    )  # rows of attention that see no key: there transformers computes something of all tokens
    for name, labels in batch.items():
        if name.startswith("labels") and bool((labels.cpu()[before] != IGNORED).any()):
            raise DataError(
                f"split_batch: {name!r} has labels at padding before the first token, of which no key is seen. Set them to "
                f"{IGNORED} where attention_mask is 0."
            )
    every = mask if mask.tokens == rows * tokens else Mask.joined([mask] * rows)
    return every.seeing(shown.flatten())


def _shards(tensors: dict[str, Tensor], index: Tensor, count: int) -> dict[str, Tensor]:
    """Of each tensor [B, T, ...] the tokens `index`, of which the first `count` are real."""
    shards = {}
    for name, tensor in tensors.items():
        shard = tensor.index_select(1, to_device(index, tensor.device))
        # The padding repeats token 0: its labels are ignored, and zeros are valid ids and positions.
        shard[:, count:] = IGNORED if name.startswith("labels") else 0
        shards[name] = shard
    return shards
