"""A batch of whole sequences to this rank's tokens, positions and labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshkit.errors import DataError
from meshkit.mask import Mask
from meshkit.memory.loss import IGNORED
from meshkit.parallel.context._choose import Choice, choose_for_rows
from meshkit.parallel.context._layout import Layout
from meshkit.parallel.context._split_mask import SplitMask
from meshkit.parallel.context._traffic import Shape
from meshkit.strategy import ContextPolicy


@dataclass(eq=False)
class Context:
    """How a model's batches are split over `cp`. Made by `context_parallel`.

    shape: an attention layer, to weigh schemes by what they send. window: the model's own sliding window.
    multiple: every rank's tokens are padded to a multiple of it (tp, with sequence parallelism).
    """

    axis: DeviceMesh
    policy: ContextPolicy
    shape: Shape
    window: int | None = None
    multiple: int = 1
    documents: bool = True  # do positions tell documents?
    choice: Choice | None = None  # of the last batch

    @property
    def rank(self) -> int:
        return self.axis.get_local_rank()

    def split(self, batch: dict[str, Tensor], mask: Mask | None = None) -> dict[str, Tensor | SplitMask]:
        """See `split_batch`."""
        rows, tokens = _refuse_odd_shapes(batch)
        mask = _mask_of(batch, rows, tokens, mask, documents=self.documents)
        self.choice, alike = choose_for_rows(
            mask.windowed(self.window),
            rows,
            tokens,
            self.axis.size(),
            self.policy,
            self.shape,
            multiple=self.multiple,
        )
        stream = alike == 1
        layout = self.choice.layout
        self._refuse_different_batches(batch["input_ids"], layout)
        whole = dict(batch)
        if "position_ids" not in whole:
            whole["position_ids"] = torch.arange(tokens, device=batch["input_ids"].device).expand(rows, tokens)
        index, kept = _places(layout, self.rank)
        part: dict[str, Tensor | SplitMask] = {}
        for name, tensor in whole.items():
            flat = tensor.reshape(1, rows * tokens, *tensor.shape[2:]) if stream else tensor
            own = flat.index_select(1, index.to(tensor.device))
            own[:, kept:] = IGNORED if name.startswith("labels") else 0
            part[name] = own
        part["mask"] = SplitMask(layout, self.axis, rows=rows if stream else 0)
        return part

    def _refuse_different_batches(self, ids: Tensor, layout: Layout) -> None:
        """Messages of ranks that planned differently would not match. Wire: one all-reduce of two numbers over cp."""
        content = torch.cat([ids.flatten().cpu(), layout.table(), torch.tensor(ids.shape)])
        digest = (content * torch.arange(1, content.numel() + 1)).sum() + 1_000_003 * content.numel()
        group = self.axis.get_group()
        on_host = "cpu" in dist.get_backend_config(group)  # then nothing waits for the device
        extremes = torch.stack([digest, -digest]).to("cpu" if on_host else self.axis.device_type)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        if int(extremes[0]) != -int(extremes[1]):
            raise DataError(
                f"split_batch: the ranks of cp={self.axis.size()} were given different batches. Ranks that differ only in "
                "cp read the same rows, with the same positions and mask: load them by mesh.data_rank of mesh.data_ranks."
            )


def _refuse_odd_shapes(batch: dict[str, Tensor]) -> tuple[int, int]:
    if "input_ids" not in batch or batch["input_ids"].ndim != 2:
        raise DataError("split_batch: the batch needs input_ids [rows, tokens], from which the split is made.")
    rows, tokens = batch["input_ids"].shape
    for name, tensor in batch.items():
        if tuple(tensor.shape[:2]) != (rows, tokens):
            raise DataError(
                f"split_batch: {name!r} has shape {tuple(tensor.shape)}, but input_ids are {rows} rows of {tokens} tokens. "
                "Tensors of a split batch hold one entry for each token."
            )
    if not rows or not tokens:
        raise DataError(f"split_batch: {rows} rows of {tokens} tokens are nothing to split.")
    return rows, tokens


def _mask_of(batch: dict[str, Tensor], rows: int, tokens: int, mask: Mask | None, *, documents: bool) -> Mask:
    """The mask of the batch: of one row that all are like, or of all rows end to end."""
    if mask is not None:
        mask.refuse_misfit(rows, tokens)
        return mask
    if "position_ids" not in batch or not documents:
        return Mask.causal(tokens)
    found = Mask.from_positions(batch["position_ids"])
    return Mask.causal(tokens) if found == Mask.documents([tokens] * rows) else found


def _places(layout: Layout, rank: int) -> tuple[Tensor, int]:
    """(the tokens of the rank with its padding, which repeats token 0; how many are real)."""
    pieces = [torch.arange(first, after) for first, after in layout.runs[rank]]
    real = torch.cat([*pieces, torch.empty(0, dtype=torch.int64)])
    return torch.nn.functional.pad(real, (0, layout.lengths[rank] - len(real))), len(real)
