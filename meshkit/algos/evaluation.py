"""How well a model predicts text that it was not trained on."""

from __future__ import annotations

import math

from torch import Tensor

from meshkit.data import Tokenizer, Tokens, evaluation_batches, token_bytes
from meshkit.memory.loss import IGNORED
from meshkit.step import Batch, Run


def bits_per_byte(
    run: Run, tokens: Tokens, tokenizer: Tokenizer, *, seq_len: int, rows: int, batches: int, documents: bool = True
) -> float:
    """Of the first `batches` batches of `rows` sequences a rank; independent of the tokenizer, so runs compare.

    documents: attention and positions stop at the end of a document. Every rank must call it.
    """
    sizes = token_bytes(tokenizer).to(run.mesh.device)

    def count_bytes(batch: Batch) -> Tensor:
        labels = batch["labels"]
        return sizes[labels.clamp(min=0)].masked_fill(labels == IGNORED, 0).sum()

    held_out = evaluation_batches(
        tokens,
        seq_len=seq_len,
        batch=rows,
        rank=run.mesh.data_rank,
        ranks=run.mesh.data_ranks,
        documents=documents,
    )
    nats = total = 0.0
    for _, batch in zip(range(batches), held_out, strict=False):
        loss, size = run.evaluate(batch, count=count_bytes)
        nats, total = nats + loss.item(), total + size.item()
    return nats / math.log(2) / max(total, 1)
