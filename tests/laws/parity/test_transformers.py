"""Models of transformers go through the same calls, by a plan nobody wrote."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshkit as mk
from tests.compare_shards import difference
from tests.depth import thin
from tests.laws.parity.cases import Cell, batches, mesh_for, own_rows
from tests.tiny import draw_parameters
from tests.world import pool

TOL = 1e-6  # transformers computes its norms in fp32 whatever the dtype of the model


def build(family: str) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=45,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=4,
        use_cache=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=family == "Qwen2",
        **({"sliding_window": 5} if family == "Mistral" else {}),
    )
    if family == "Llama":
        config.sliding_window = 3  # which it does not read, as moshi does not: no layer sees less by it
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double()
    draw_parameters(model)
    return model


def errors(
    family: str, mesh_text: str, sequence: bool, documents: bool, memory: mk.MemoryPolicy | None = None
) -> tuple[float, float, float]:
    mesh = mesh_for(mesh_text)
    batch = batches(Cell(mesh=mesh_text, vocab=61, documents=documents))[0]
    positions = {"position_ids": batch["position_ids"]} if documents else {}
    one = build(family)
    logits = one(batch["input_ids"], **positions).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    loss.backward()
    model = build(family)
    run = mk.parallelize(model, mesh, plan=mk.plan.auto_plan(model), sequence=sequence, memory=memory)
    mean = run.forward_backward(own_rows(batch, mesh), microbatches=2)
    gradients = dict(one.named_parameters())
    worst = max(difference(p.grad, gradients[name].grad) for name, p in run.named_parameters())
    norm = nn.utils.get_total_norm([p.grad for p in one.parameters()])
    return abs(mean.item() - loss.item()), worst, abs(mk.step.grad_norm(run).item() - norm.item())


FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
RUNS = [
    ("dp_shard=4", False, False),
    ("tp=4", True, True),
    ("dp_shard=2 tp=2", True, False),
    ("dp_replicate=2 tp=2", False, True),
    ("cp=4", False, True),
    ("cp=2 tp=2", True, False),
]


@pytest.mark.parametrize(
    ("family", "mesh", "sequence", "documents"), thin([(family, *run) for run in RUNS for family in FAMILIES], 5)
)
def test_a_transformers_model_equals_itself_on_one_device(
    family: str, mesh: str, sequence: bool, documents: bool
) -> None:
    for found in pool(4).run(errors, family, mesh, sequence, documents):
        assert max(found) <= TOL


def test_heads_that_tp_does_not_divide_repeat_as_many_keys_as_each_rank_reads() -> None:
    """8 query heads and 2 key/value heads on 3 ranks, which repeat theirs 2, 1 and 3 times: documents have masks, with which
    attention of transformers does so itself.
    """
    for found in pool(3).run(errors, "Llama", "tp=3", False, True):
        assert max(found) <= TOL


@pytest.mark.parametrize(
    ("family", "mesh", "sequence"),
    [("Llama", "dp_shard=2 tp=2", True), ("Qwen2", "dp_shard=4", False), ("Llama", "cp=2 tp=2", False)],
)
def test_a_transformers_model_with_a_chunked_loss_equals_itself_on_one_device(
    family: str, mesh: str, sequence: bool
) -> None:
    memory = mk.MemoryPolicy(loss=mk.strategy.ChunkedLoss(tokens=5))
    for found in pool(4).run(errors, family, mesh, sequence, True, memory):
        assert max(found) <= TOL


def gradients_with_a_cache(recompute: str) -> bool:
    """Whether they are those of no recompute and no cache."""
    ids = torch.arange(24).view(2, 12) % 20
    gradients = []
    for cache in (True, False):
        model = build("Llama")
        model.config.use_cache = cache
        memory = mk.MemoryPolicy(recompute=recompute if cache else "none")
        run = mk.parallelize(model, mk.init_mesh(), memory=memory)
        run.forward_backward({"input_ids": ids, "labels": ids})
        gradients.append([param.grad for param in run.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_blocks_that_run_again_have_no_cache(recompute: str) -> None:
    """With transformers' default they found their keys of the forward in it, and ended in a RuntimeError."""
    assert pool(1).run(gradients_with_a_cache, recompute) == [True]
