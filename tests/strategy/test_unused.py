"""What is chosen has an effect or is refused: nothing that was asked for is passed over in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import meshkit as mk
from meshkit.strategy import (
    ActivationOffload,
    BlockTopK,
    ChunkedLoss,
    ContextPolicy,
    ExpertPolicy,
    Recompute,
    VerticalSlash,
)

TOP, SLASH = BlockTopK(block=64, top=16), VerticalSlash(block=64, vertical=8, slash=8)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: Recompute(mode="full", keep=("matmul",)),
            r"mode='full', keep=\('matmul',\)\): .* runs all of a block again",
        ),
        (lambda: Recompute(mode="none", keep=()), "keeps everything anyway"),
        (lambda: Recompute(mode="selective", keep=("product",)), "'product' is what mode='activation' may keep"),
        (lambda: Recompute(mode="activation", keep=("matmul",)), "keeps matrix products anyway, .* only 'product'"),
        (lambda: Recompute(mode="none", every=2), "no block is treated, so not every 2-th either"),
        (lambda: ActivationOffload(staging=1 << 20), 'staging=1048576\\) is host memory for writes of to="disk"'),
        (lambda: ChunkedLoss(tokens=64, backend="liger"), "liger chooses its own chunks"),
        (lambda: ExpertPolicy(history=9), "history=9 is how busy experts are found, but copies=0"),
        (lambda: ExpertPolicy(target=1.2), "target=1.2 is when copies are enough, but copies=0 makes none"),
        (lambda: ExpertPolicy(copies=1, spare=1), "spare=1 .* beyond its share, with owners='fixed'"),
        (
            lambda: ContextPolicy(scheme="ring", kv_heads_per_gather=2),
            "kv_heads_per_gather=2 is of the scheme all_gather, but this one is 'ring'",
        ),
        (lambda: ContextPolicy(balance="zigzag", slack=0.1), "slack=0.1 .* but balance='zigzag' does not look at it"),
        (
            lambda: ContextPolicy(sparse=TOP, scheme="ring"),
            "sparse=BlockTopK with scheme='ring' .* sent directly to the ranks that chose them. Leave scheme",
        ),
        (lambda: ContextPolicy(sparse=TOP, scheme="group_cast", ulysses=2), "ulysses=2: chosen blocks are sent"),
        (lambda: ContextPolicy(sparse=SLASH, balance="zigzag"), "balance='zigzag' .* whole blocks, in turn"),
        (lambda: ContextPolicy(sparse=SLASH, slack=0.1), "slack=0.1: ranks hold whole blocks, in turn"),
        (
            lambda: ContextPolicy(sparse=SLASH, groups="by_length"),
            "VerticalSlash with groups='by_length': these count with all pairs that the mask shows. Use groups='fixed'",
        ),
        (lambda: ContextPolicy(sparse="top"), "sparse='top' is no choice of blocks. Give BlockTopK"),  # type: ignore[arg-type]
        (lambda: BlockTopK(block=64, top=0), "BlockTopK: top=0 must be a whole number of at least 1"),
        (lambda: VerticalSlash(block=2.5, vertical=1, slash=1), "VerticalSlash: block=2.5 must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_a_field_that_another_field_makes_idle_is_refused(make: Callable[[], Any], error: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=error):
        make()
