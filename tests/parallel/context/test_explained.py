"""What attention of other people's models sends on cp is what `explain` says, where the plan names no attention()."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import meshkit as mk
from meshkit.plan import Plan
from meshkit.preflight.explain import Message
from tests.laws.parity.cases import TOKENS, mesh_for
from tests.laws.parity.test_bytes import assert_alike, seen_and_said
from tests.world import pool
from tests.zoo import causal
from tests.zoo.shrink import VOCABULARY


def observed(kind: str, scheme: str) -> tuple[Counter[Message], Counter[Message]]:
    torch.manual_seed(0)
    run = mk.parallelize(
        causal.build(kind),
        mesh_for("cp=2"),
        plan=Plan(),  # which names nothing
        unproved="replicate",
        context=mk.strategy.ContextPolicy(scheme=scheme),  # type: ignore[arg-type]
    )
    ids = torch.arange(2 * TOKENS).view(2, -1) % VOCABULARY
    return seen_and_said(run, {"input_ids": ids, "labels": ids}, microbatches=1)


# Grouped heads, fused heads, windows in some layers, chunks, values of another width, layers without attention.
@pytest.mark.parametrize(
    "kind", ["llama", "gpt2", "mistral", "gemma3_text", "gpt_oss", "llama4_text", "deepseek_v3", "lfm2", "mamba"]
)
def test_attention_sends_what_is_explained(kind: str) -> None:
    assert_alike(pool(2).run(observed, kind, "auto"))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "group_cast", "ulysses"])
def test_every_scheme_sends_what_is_explained(scheme: str) -> None:
    assert_alike(pool(2).run(observed, "gemma3_text", scheme))
