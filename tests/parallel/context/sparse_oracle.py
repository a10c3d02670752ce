"""The oracle of sparse attention: plain loops choose blocks of keys, and attention is written out under a dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from meshkit.mask import Mask
from meshkit.strategy import BlockTopK, Sparse, VerticalSlash


def blocks_in(mask: Mask, block: int) -> list[tuple[int, int, int]]:
    """(first, after, document), each document cut from its start."""
    edges = sorted({0, mask.tokens}.union(*mask.components))
    return [
        (start, min(start + block, after), number)
        for number, (first, after) in enumerate(pairwise(edges))
        for start in range(first, after, block)
    ]


def chosen_blocks(q: Tensor, k: Tensor, mask: Mask, sparse: Sparse, scale: float, *, shown: Tensor) -> Tensor:
    """q [T, H, D], k [T, K, D] -> [H, blocks, blocks]. shown: bool [T, T], what a layer sees of the mask."""
    blocks = blocks_in(mask, sparse.block)
    may = torch.tensor([[bool(shown[a:b, c:d].any()) for c, d, _ in blocks] for a, b, _ in blocks])
    choose = _top if isinstance(sparse, BlockTopK) else _vertical_slash
    group = q.shape[1] // k.shape[1]
    chosen = [
        choose(q[:, head].detach(), k[:, head // group].detach(), blocks, may, sparse, scale, shown)  # type: ignore[arg-type]
        for head in range(q.shape[1])
    ]
    return torch.stack(chosen)


def _top(
    q: Tensor,
    k: Tensor,
    blocks: list[tuple[int, int, int]],
    may: Tensor,
    sparse: BlockTopK,
    scale: float,
    shown: Tensor,
) -> Tensor:
    chosen = torch.zeros_like(may)
    for i, (a, b, _) in enumerate(blocks):
        scores = [float(q[a:b].mean(0) @ k[c:d].mean(0)) for c, d, _ in blocks]
        order = sorted((j for j in range(len(blocks)) if may[i, j]), key=lambda j: (j != i, -scores[j]))
        chosen[i, order[: sparse.top]] = True
    return chosen


def _vertical_slash(
    q: Tensor,
    k: Tensor,
    blocks: list[tuple[int, int, int]],
    may: Tensor,
    sparse: VerticalSlash,
    scale: float,
    shown: Tensor,
) -> Tensor:
    chosen = torch.zeros_like(may)
    for document in {number for _, _, number in blocks}:
        mine = [i for i, block in enumerate(blocks) if block[2] == document]
        first, after = blocks[mine[0]][0], blocks[mine[-1]][1]
        last = range(max(first, after - sparse.queries), after)
        scores = (q[last.start : last.stop] @ k.T * scale).masked_fill(~shown[last.start : last.stop], float("-inf"))
        p = scores.softmax(-1).nan_to_num(0.0)
        columns = {j: float(p[:, blocks[j][0] : blocks[j][1]].sum()) for j in mine}
        diagonals = dict.fromkeys(range(len(mine)), 0.0)
        for at, token in enumerate(last):
            i = next(i for i in mine if token < blocks[i][1])
            for j in mine:
                diagonals[abs(i - j)] += float(p[at, blocks[j][0] : blocks[j][1]].sum())
        columns[mine[0]] = diagonals[0] = float("inf")
        long = len(mine) > max(sparse.vertical, sparse.slash)
        best = sorted(columns, key=lambda j: -columns[j])[: sparse.vertical if long else None]
        near = sorted(diagonals, key=lambda d: -diagonals[d])[: sparse.slash if long else None]
        for i in mine:
            for j in mine:
                chosen[i, j] = may[i, j] and (j in best or abs(i - j) in near)
    return chosen


def of_tokens(chosen: Tensor, mask: Mask, block: int, *, shown: Tensor) -> Tensor:
    """[..., blocks, blocks] -> [..., T, T]."""
    sizes = torch.tensor([b - a for a, b, _ in blocks_in(mask, block)])
    return chosen.repeat_interleave(sizes, -2).repeat_interleave(sizes, -1) & shown


def dense(q: Tensor, k: Tensor, v: Tensor, shown: Tensor, scale: float) -> Tensor:
    """q [T, H, D], k [T, K, D], v [T, K, E], shown [H, T, T] -> [T, H, E]; rows that see nothing are 0."""
    ratio = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(ratio, 1)) * scale
    p = scores.masked_fill(~shown, float("-inf")).softmax(-1).masked_fill(~shown, 0)
    return torch.einsum("hts,shd->thd", p, v.repeat_interleave(ratio, 1))


@dataclass(frozen=True)
class SparseRows:
    """A mask for models on one device: rows with masks of their own, of whose blocks some are chosen."""

    masks: tuple[Mask, ...]
    sparse: Sparse
    window: int | None = None

    def windowed(self, window: int | None) -> SparseRows:
        return SparseRows(self.masks, self.sparse, window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """[B, T, H, E]"""
        scale, outs = q.shape[-1] ** -0.5 if scale is None else scale, []
        for row, mask in enumerate(self.masks):
            shown = mask.windowed(self.window).dense()
            chosen = chosen_blocks(q[row], k[row], mask, self.sparse, scale, shown=shown)
            outs.append(dense(q[row], k[row], v[row], of_tokens(chosen, mask, self.sparse.block, shown=shown), scale))
        return torch.stack(outs)
