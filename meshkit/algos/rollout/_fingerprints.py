"""TOPLOC fingerprints (verifiable inference, locality-sensitive hashing): the largest entries of an answer's hidden states.

Whoever has the weights computes them again from the tokens, in one forward; whoever has other weights cannot write them.
A fingerprint is one array of bytes: for each chunk, in order, 5 bytes for each of its k entries (`ENTRY`), the largest first.
A chunk is up to 32 tokens that follow each other, that the policy wrote, and that weights of one version wrote; its entries
are the k = min(128, tokens * C) largest by magnitude of the hidden states that predicted them, the input of the head, in
bf16; of equal ones those of the first feature, then of the first token. So a whole chunk takes 640 bytes, 20 for each token.

Dims: B rows, T tokens, N tokens of an answer, C features, K = min(128, C) entries of a token, k of a chunk.
Source: Ong et al. 2025 (2501.16007), algorithm 1; they send a polynomial through the entries, 258 bytes a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshkit.errors import DataError, PlanError
from meshkit.loss.linear_logits import head_of
from meshkit.step import Run

CHUNK_TOKENS = 32
CHUNK_ENTRIES = 128
ENTRY = np.dtype([("token", "u1"), ("feature", "<u2"), ("value", "<u2")])
"""token: of its chunk, from 0. feature: of the hidden state. value: the bits of a bf16."""
LAST_FEATURE = 0xFFFF
MAGNITUDE = 0x7FFF  # the bits of a bf16 but for its sign
RANK = 0x7FFF_FFFF  # of a code, what entries are sorted by


def top_entries(hidden: Tensor) -> Tensor:
    """The K largest entries of each token's hidden state [..., C], as codes int64 [..., K] below 2^32, the largest first.

    A code is the sign, 15 bits of magnitude as bf16, and 65535 - feature: of equal magnitudes the first feature comes first,
    so that ranks with equal hidden states choose the same.
    """
    features = torch.arange(hidden.shape[-1], device=hidden.device, dtype=torch.int32)
    bits = hidden.to(torch.bfloat16).view(torch.int16)
    ranks = (bits & MAGNITUDE).int() << 16 | (LAST_FEATURE - features)
    kept = ranks.topk(min(CHUNK_ENTRIES, len(features))).values.long()
    negative = bits.gather(-1, LAST_FEATURE - (kept & LAST_FEATURE)) < 0
    return negative.long() << 31 | kept


def entries_of(codes_NK: np.ndarray) -> np.ndarray:
    """The entries [k] of a chunk, `ENTRY`, from the codes of its tokens."""
    tokens, kept = codes_NK.shape
    codes = codes_NK.reshape(-1)
    token = np.repeat(np.arange(tokens), kept)
    order = np.lexsort((token, -(codes & RANK)))[: chunk_entries(tokens, kept)]
    entries = np.empty(len(order), ENTRY)
    entries["token"] = token[order]
    entries["feature"] = LAST_FEATURE - (codes[order] & LAST_FEATURE)
    entries["value"] = codes[order] >> 16
    return entries


def chunk_entries(tokens: int, kept: int) -> int:
    """k of a chunk of so many tokens, of which each has `kept` entries."""
    return min(CHUNK_ENTRIES, tokens * kept)


def chunks_of(wrote: np.ndarray, versions: np.ndarray) -> list[np.ndarray]:
    """The places of each chunk's tokens in the answer. wrote: [N] bool; versions: [N]."""
    places = np.flatnonzero(wrote)
    ends = np.flatnonzero((np.diff(places) != 1) | (np.diff(versions[places]) != 0)) + 1
    return [
        run[first : first + CHUNK_TOKENS]
        for run in np.split(places, ends)
        for first in range(0, len(run), CHUNK_TOKENS)
    ]


def fingerprint_bytes(versions: np.ndarray, features: int) -> int:
    """Of an answer whose tokens the policy wrote, all of them. versions: [N]; features: C."""
    chunks = chunks_of(np.ones(len(versions), bool), versions)
    return sum(chunk_entries(len(places), min(CHUNK_ENTRIES, features)) for places in chunks) * ENTRY.itemsize


def most_fingerprint_bytes(tokens: int, versions: int) -> int:
    """The most of an answer of so many tokens, written by weights of so many versions: each may end with part of a chunk."""
    return (tokens + (CHUNK_TOKENS - 1) * versions) // CHUNK_TOKENS * CHUNK_ENTRIES * ENTRY.itemsize


@dataclass(eq=False)
class GrowingFingerprint:
    """Of an answer in progress. chunks: entries of those that are whole; codes: [K] of each token of the one that grows."""

    chunks: list[np.ndarray] = field(default_factory=list)
    codes: list[np.ndarray] = field(default_factory=list)
    version: int = 0

    def add(self, codes_K: np.ndarray, version: int) -> None:
        """A token that weights of this version wrote."""
        if self.codes and (len(self.codes) == CHUNK_TOKENS or version != self.version):
            self.chunks.append(entries_of(np.stack(self.codes)))
            self.codes = []
        self.codes.append(codes_K)
        self.version = version

    def state_dict(self) -> dict[str, Tensor]:
        """As tensors, for `Generation.state_dict`."""
        chunks = np.concatenate([np.zeros(0, ENTRY), *self.chunks]).view(np.uint8)
        return {"fingerprint": torch.from_numpy(chunks), "fingerprint_codes": torch.from_numpy(np.stack(self.codes))}

    @classmethod
    def of_state(cls, state: Mapping[str, Any], version: int) -> GrowingFingerprint:
        """version: of the last token. Raises: DataError if the state has none."""
        if "fingerprint" not in state:
            raise DataError(
                "generate(fingerprints=True): the state has answers that were begun without. Load it without fingerprints, "
                "or begin these answers again."
            )
        return cls([state["fingerprint"].numpy().view(ENTRY)], list(state["fingerprint_codes"].numpy()), version)

    @property
    def data(self) -> np.ndarray:
        """The fingerprint of the tokens so far, uint8."""
        chunks = [*self.chunks, entries_of(np.stack(self.codes))] if self.codes else self.chunks
        return np.concatenate([np.zeros(0, ENTRY), *chunks]).view(np.uint8)


def features_of(run: Run, *, asked: str) -> int:
    """C, of the model's head. Raises: PlanError for a model without one, or with features whose number takes over 16 bits."""
    model = run.resolved.program.model
    name = head_of(model, run.plan, asked=asked)
    head = model.get_submodule(name)
    assert isinstance(head, nn.Linear)
    if head.in_features > LAST_FEATURE + 1:
        raise PlanError(
            f"{asked}: the head {name!r} reads {head.in_features} features, and an entry has 16 bits for a feature's number. "
            "Use a model with at most 65536."
        )
    return head.in_features


@contextmanager
def heads_input(run: Run) -> Iterator[list[Tensor]]:
    """Within it, the list has the hidden states [B, T, C] that the head has read in each forward, on the rank that has it."""
    module = run.model.get_submodule(head_of(run.resolved.program.model, run.plan, asked="fingerprints"))
    seen: list[Tensor] = []
    if not isinstance(module, nn.Linear):  # the head is on another stage of pp
        yield seen
        return
    handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    try:
        # A compiled forward would not call a hook that came after it was compiled.
        with torch.compiler.set_stance("force_eager"):
            yield seen
    finally:
        handle.remove()
