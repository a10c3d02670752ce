"""Sum of the words of a tensor (checksum), which any flipped bit changes: at the speed of memory, on the tensor's device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 8  # bytes
SMALL = 2048  # elements
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def word_sum(local: Tensor) -> Tensor:
    """Modulo 2^64, int64 []; the same for the same bytes, wherever they lie. The host does not wait for it."""
    flat = local.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    per_word = WORD // size
    if per_word > 1 and flat.storage_offset() % per_word:
        flat = flat.clone()  # reading shorter words costs more, and would give another sum
    rest = flat.numel() % per_word
    if not rest:
        return flat.view(torch.int64).sum()
    last = flat[flat.numel() - rest :].view(_WORDS[size]).sum(dtype=torch.int64)
    return last if rest == flat.numel() else flat[:-rest].view(torch.int64).sum() + last


def word_sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`word_sum` of each; small ones of one shape in one kernel, for of those the calls take the time, and not the memory."""
    sums: list[Tensor | None] = [None] * len(tensors)
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel() <= SMALL and (tensor.numel() == 1 or tensor.nbytes % WORD == 0) and not tensor.is_complex():
            alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(index)
        else:
            sums[index] = word_sum(tensor)
    for indices in alike.values():
        rows = torch.stack([tensors[index] for index in indices]).view(len(indices), -1)
        size = rows.element_size()
        words = rows.view(_WORDS[size] if rows.shape[1] == 1 else torch.int64)
        for index, each in zip(indices, words.sum(1, dtype=torch.int64).unbind(), strict=True):
            sums[index] = each
    return [each for each in sums if each is not None]
