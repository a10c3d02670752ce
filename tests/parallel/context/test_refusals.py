"""What context parallelism cannot do it refuses, on every rank, with a text that says what to change; nothing hangs."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.errors import MeshkitError
from meshkit.mask import Mask
from meshkit.parallel.context import Shape, SplitMask, choose
from meshkit.parallel.context._foreign import _attend_dot_products
from meshkit.strategy import ContextPolicy
from tests.laws.parity.cases import Cell, build, mesh_for
from tests.recipes.launch import run as launch
from tests.world import RankError, pool, run_ranks

TOKENS, VOCAB = 12, 17
IDS = torch.arange(2 * TOKENS).reshape(2, TOKENS) % VOCAB
BATCH = {"input_ids": IDS}
TOL = 1e-10


class Attention(nn.Module):
    """Calls F.scaled_dot_product_attention with whatever it is told to."""

    def __init__(self, **given: object) -> None:
        super().__init__()
        self.qkv, self.given = nn.Linear(16, 48), given

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **self.given).transpose(1, 2).flatten(-2)


class Model(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attn = nn.Embedding(VOCAB, 16), attn

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.attn(self.embed(input_ids))


class MultiHead(nn.Module):
    """torch's own attention, which reaches F.scaled_dot_product_attention from inside of a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class WrittenOut(nn.Module):
    """No call of F.scaled_dot_product_attention at all."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class InOneCall(nn.Module):
    """Products that no line has alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bts,bsd->btd", torch.einsum("btd,bsd->bts", x, x).softmax(-1), x)


def axis(ranks: int = 2) -> torch.distributed.device_mesh.DeviceMesh:
    return mesh_for(f"cp={ranks}")["cp"]


def parallel(attn: nn.Module, **given: object) -> Model:
    return mk.context_parallel(Model(attn).double(), axis(), attention=["attn"], **given)  # type: ignore[return-value]


def call(module: nn.Module, batch: dict[str, Tensor] = BATCH, mask: Mask | None = None) -> Tensor:
    """Split, run and join."""
    part = mk.split_batch(module, batch, mask=mask)
    split = part.pop("mask")
    output = module(**part, mask=split)
    whole: Tensor = split.join(getattr(output, "logits", getattr(output, "last_hidden_state", output)))
    return whole


def transformer(family: str, head: str = "ForCausalLM", **given: object) -> nn.Module:
    import transformers

    warnings.simplefilter("ignore")  # of special tokens outside of a tiny vocabulary
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = getattr(transformers, f"{family}Config")(**{**sizes, **ids, **given})
    torch.manual_seed(0)
    return getattr(transformers, f"{family}{head}")(config).double().eval()


LLAMA = {"intermediate_size": 45, "num_key_value_heads": 2}


def split_transformer(family: str, head: str = "ForCausalLM", **given: object) -> nn.Module:
    return mk.context_parallel(transformer(family, head, **given), axis())


def ready(**given: object) -> tuple[nn.Module, SplitMask]:
    model = parallel(Attention(is_causal=True))
    mask = mk.split_batch(model, BATCH)["mask"]
    return model, mask


# ------------------------------------------------------------------------- mistakes, each made by both ranks of cp=2


def attention_with(**given: object) -> Callable[[], object]:
    return lambda: call(parallel(Attention(**given)))


def attend_other_tokens() -> None:
    _, mask = ready()
    q = torch.zeros(2, mask.tokens + 1, 4, 4)
    mask.attend(q, q, q)


def attend_heads(query: int, kv: int, value_dim: int, value_heads: int | None = None) -> None:
    _, mask = ready()
    shapes = ((query, 4), (kv, 4), (value_heads or kv, value_dim))
    q, k, v = (torch.zeros(2, mask.tokens, *shape) for shape in shapes)
    mask.attend(q, k, v)


def attend_outside() -> None:
    model = parallel(Attention(is_causal=True))
    model.attn(torch.zeros(2, TOKENS // 2, 16, dtype=torch.float64))


def different_batches() -> None:
    call(parallel(Attention(is_causal=True)), {"input_ids": IDS + dist.get_rank()})


def transformer_with_dropout() -> None:
    model = split_transformer("Llama", **LLAMA)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    call(model.train())


def transformer_attention(**given: object) -> None:
    from meshkit.parallel.context._foreign import _transformers_attention

    _, mask = ready()
    q = torch.zeros(2, 4, mask.tokens, 4)
    _transformers_attention(nn.Linear(1, 1), q, q, q, **{"attention_mask": None, "mask": mask, **given})  # type: ignore[arg-type]


def without_context() -> None:
    mk.split_batch(nn.Linear(1, 1), BATCH)


def unsplit() -> None:
    parallel(Attention(is_causal=True))(IDS)


def plain_mask() -> None:
    parallel(Attention(is_causal=True))(IDS, mask=Mask.causal(TOKENS))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "scheme": (
        lambda: mk.context_parallel(Model(Attention()), axis(), policy=mk.strategy.ContextPolicy(scheme="strip")),  # type: ignore[arg-type]
        "PlanError: context scheme 'strip' does not exist. Choose one of auto, ring, all_gather, group_cast, ulysses.",
    ),
    "balance": (
        lambda: mk.context_parallel(Model(Attention()), axis(), policy=mk.strategy.ContextPolicy(balance="stripe")),
        "PlanError: context balance 'stripe' does not exist. "
        "Choose one of auto, contiguous, zigzag, per_document, locality.",
    ),
    "ulysses does not divide cp": (
        lambda: parallel(Attention(), policy=mk.strategy.ContextPolicy(scheme="ring", ulysses=3)),
        "PlanError: context ulysses=3 does not divide cp=2. Choose one of 1, 2, or another cp.",
    ),
    "ulysses twice": (
        lambda: parallel(Attention(), policy=mk.strategy.ContextPolicy(scheme="ulysses", ulysses=2)),
        "PlanError: context scheme 'ulysses' with ulysses=2: only ring and group_cast have a second dimension of Ulysses. "
        'Leave ulysses away, or use scheme="ring".',
    ),
    "no heads at a time": (
        lambda: parallel(Attention(), policy=mk.strategy.ContextPolicy(scheme="all_gather", kv_heads_per_gather=0)),
        "PlanError: context kv_heads_per_gather=0: at least 1 head is sent at a time.",
    ),
    "a module that attends by itself": (
        lambda: mk.context_parallel(Model(InOneCall()), axis()),
        r"PlanError: context parallelism: Model cannot be split by its tokens. attn: aten.bmm.default at "
        r"test_refusals.py:\d+: it runs on parts along different dims. Use cp=1, or leave it to the other axes.",
    ),
    "a module that nothing is known of": (
        lambda: mk.context_parallel(Attention(), axis()),
        r"PlanError: context_parallel: Attention.forward takes no `mask` and no token ids by which it could be read, so its "
        r"attention would see this rank's tokens only. Give parallelize\(example=...\), take a `mask` and call "
        r"mask.attend\(q, k, v\), or name the modules",
    ),
    "a pattern that names nothing": (
        lambda: mk.context_parallel(Model(Attention()), axis(), attention=["atn"]),
        "PlanError: .*'atn'",
    ),
    "no context": (
        without_context,
        "PlanError: split_batch: Linear did not go through context_parallel. Call that first.",
    ),
    "no split": (
        unsplit,
        "PlanError: context parallelism: Model was called without `mask=` of a split batch, and would attend to this rank's "
        r"tokens only. Call batch = mk.split_batch\(model, batch\), and hand on its mask.",
    ),
    "a mask that is not split": (plain_mask, "PlanError: .* Model was called without `mask=` of a split batch"),
    "no input_ids": (
        lambda: mk.split_batch(parallel(Attention()), {"labels": IDS}),
        r"DataError: split_batch: the batch needs input_ids \[rows, tokens\], from which the split is made.",
    ),
    "flat input_ids": (
        lambda: mk.split_batch(parallel(Attention()), {"input_ids": IDS[0]}),
        r"DataError: split_batch: the batch needs input_ids \[rows, tokens\]",
    ),
    "a tensor of rows": (
        lambda: mk.split_batch(parallel(Attention()), {**BATCH, "weights": torch.ones(2)}),
        r"DataError: split_batch: 'weights' has shape \(2,\), but input_ids are 2 rows of 12 tokens. "
        "Tensors of a split batch hold one entry for each token.",
    ),
    "nothing": (
        lambda: mk.split_batch(parallel(Attention()), {"input_ids": IDS[:0]}),
        "DataError: split_batch: 0 rows of 12 tokens are nothing to split.",
    ),
    "different batches": (
        different_batches,
        "DataError: split_batch: the ranks of cp=2 were given different batches. Ranks that differ only in cp read the same "
        "rows, with the same positions and mask: load them by mesh.data_rank of mesh.data_ranks.",
    ),
    "a mask of other tokens": (
        lambda: mk.split_batch(parallel(Attention()), BATCH, mask=Mask.causal(13)),
        "PlanError: the mask is of 13 tokens, but the batch has 2 rows of 12. Give a mask of 12 tokens for "
        "every row, or of all 24 tokens, rows end to end.",
    ),
    "attn_mask": (
        attention_with(attn_mask=torch.ones(6, 6, dtype=torch.bool)),
        r"PlanError: context parallelism: Model cannot be split by its tokens. attn at test_refusals.py:\d+: PlanError: "
        "scaled_dot_product_attention with attn_mask cannot be split. Use is_causal, no dropout, and",
    ),
    "dropout": (
        attention_with(is_causal=True, dropout_p=0.25),
        "PlanError: .* scaled_dot_product_attention with dropout_p=0.25 cannot be split.",
    ),
    "not causal": (
        attention_with(is_causal=False),
        "PlanError: context parallelism: the module attends with is_causal=False, but the batch was split for a mask that is "
        r"causal. Give split_batch the mask that the module means, for example mask=Mask.full\(tokens\).",
    ),
    "causal": (
        lambda: call(parallel(Attention(is_causal=True)), mask=Mask.full(TOKENS)),
        "PlanError: .* with is_causal=True, but the batch was split for a mask that is not causal.",
    ),
    "outside": (
        attend_outside,
        "PlanError: context parallelism: attention ran outside of the model's forward, so there is no split to follow. "
        "Call the module that went through context_parallel; and where the model recomputes by a checkpoint of its own, use "
        r"MemoryPolicy\(recompute=\) in its place.",
    ),
    "other tokens": (
        attend_other_tokens,
        "PlanError: context parallelism: this rank holds 6 tokens, but attention got queries of 7 and keys of 7. "
        "Give the model the batch of split_batch whole.",
    ),
    "heads": (
        lambda: attend_heads(4, 3, 4),
        r"PlanError: context parallelism: queries \(2, 6, 4, 4\), keys \(2, 6, 3, 4\) and values \(2, 6, 3, 4\) do not fit. "
        "Query heads are a multiple of key/value heads, and all have one head_dim.",
    ),
    "values of other heads": (lambda: attend_heads(4, 2, 8, 4), r"PlanError: .* values \(2, 6, 4, 8\) do not fit."),
    "dropout of a config": (
        lambda: split_transformer("Llama", **LLAMA, attention_dropout=0.1),
        "PlanError: context parallelism: attention_dropout=0.1, but no kernel draws dropout by the place in the sequence, so "
        "it would depend on the split. Set attention_dropout=0.",
    ),
    "dropout of a module": (
        transformer_with_dropout,
        "PlanError: context parallelism: LlamaAttention asks for dropout, which no scheme here computes.",
    ),
    "a bias of positions": (
        lambda: transformer_attention(position_bias=torch.zeros(4)),
        "PlanError: .* Linear asks for position_bias, which no scheme",
    ),
    "attention_mask": (
        lambda: transformer_attention(attention_mask=torch.ones(2, 1, 6, 6)),
        "PlanError: .* Linear makes an attention mask of its own, which is about this rank's tokens only.",
    ),
}


def text_of(name: str, table: str = "MISTAKES") -> str:
    """The refusal of a mistake, on this rank; the world lives on."""
    mistake, _ = globals()[table][name]
    try:
        mistake()
    except MeshkitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rank_refuses_what_cannot_be_done(mistake: str) -> None:
    _, text = MISTAKES[mistake]
    for found in pool(2).run(text_of, mistake, timeout_s=30):
        assert re.match(text, found, re.DOTALL), found


# ----------------------------------- what would be computed wrongly without a word, were it not refused; each says how

SILENT: dict[str, tuple[Callable[[], object], str]] = {
    "torch's MultiheadAttention": (lambda: call(parallel(MultiHead()), mask=Mask.full(TOKENS)), "local attention"),
    "a named module that never calls sdpa": (lambda: call(parallel(WrittenOut())), "local attention"),
    "an encoder of transformers, split for causal": (
        lambda: call(split_transformer("Bert", "Model", intermediate_size=45)),
        "causal attention",
    ),
    "a label where no key is seen": (
        lambda: call(
            split_transformer("Llama", **LLAMA),
            {**BATCH, "labels": IDS, "attention_mask": torch.arange(TOKENS).expand(2, -1).ge(3).long()},
        ),
        "a token before the first one sees all tokens in transformers, and none here",
    ),
    "padding to a model that counts positions by it": (
        lambda: call(
            split_transformer("OPT", ffn_dim=40, word_embed_proj_dim=32),
            {**BATCH, "attention_mask": torch.arange(TOKENS).expand(2, -1).ge(3).long()},
        ),
        "positions that count padding",
    ),
    "a mask that shows one row to another": (
        lambda: call(parallel(Attention(is_causal=True)), mask=Mask.causal(2 * TOKENS)),
        "rows see each other, which they do not on one device",
    ),
}


@pytest.mark.parametrize("mistake", SILENT)
def test_no_rank_computes_something_else_in_silence(mistake: str) -> None:
    for found in pool(2).run(text_of, mistake, "SILENT", timeout_s=30):
        assert found.startswith(("PlanError", "DataError")), found


def different_masks() -> None:
    model = parallel(Attention(is_causal=True))
    call(model)
    call(model, mask=Mask.documents([3, 9] if dist.get_rank() else [TOKENS]))


def test_different_masks_are_refused() -> None:
    with pytest.raises(RankError, match="DataError: split_batch: the ranks of cp=2 were given different"):
        run_ranks(2, different_masks, timeout_s=30)


# ----------------------------------------------------------------------------- to be computed, and not to be refused


def error_of_short_documents() -> float:
    """A window clips the band of a one-token document, which then no longer says that it is causal."""
    position_ids = torch.tensor([[0, *range(TOKENS - 1)]] * 2)
    mask = Mask.from_positions(position_ids).windowed(4)
    whole = call(parallel(Attention(is_causal=True)), {**BATCH, "position_ids": position_ids}, mask)
    return float(whole.shape[1] - TOKENS)


def test_one_token_documents_are_causal_under_a_window() -> None:
    assert run_ranks(2, error_of_short_documents, timeout_s=30) == [0.0, 0.0]


def configs_after() -> str:
    one = transformer("Llama", **LLAMA)
    before = one.config._attn_implementation
    mk.context_parallel(type(one)(one.config), axis())
    return "as before" if one.config._attn_implementation == before else "meshkit"


def test_another_model_of_the_same_config_keeps_its_attention() -> None:
    assert pool(2).run(configs_after) == ["as before"] * 2


def mask_on_one_rank(family: str) -> str:
    one = mesh_for("dp_shard=2")["cp"]
    model = transformer("Llama", **LLAMA) if family == "Llama" else Model(Attention(is_causal=False)).double()
    mk.context_parallel(model, one, attention=[] if family == "Llama" else ["attn"])
    try:
        mk.split_batch(model, BATCH, mask=Mask.full(TOKENS))
    except MeshkitError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("family", ["Llama", "own"])
def test_a_mask_that_a_model_cannot_take_is_refused_on_an_axis_of_one_rank(family: str) -> None:
    """Size-1 axes always exist, and the same lines must not mean something else there."""
    for found in pool(2).run(mask_on_one_rank, family):
        assert "takes no `mask`, so on one rank of cp it would not be followed" in found


# ---------------------------------------------------------------------------------------------------- without any rank


def test_a_policy_is_checked_before_there_are_ranks() -> None:
    with pytest.raises(mk.errors.PlanError, match="context scheme 'all_gather' with ulysses=2"):
        ContextPolicy(scheme="all_gather", ulysses=2)
    with pytest.raises(
        mk.errors.PlanError, match="context ulysses=4 does not divide cp=6. Choose one of 1, 2, 3, 6, or another cp."
    ):
        choose(Mask.causal(8), 6, ContextPolicy(ulysses=4), Shape(heads=4, kv_heads=4, head_dim=8))
    with pytest.raises(mk.errors.PlanError, match="context ulysses=0 does not divide cp=6."):
        ContextPolicy(ulysses=0).refuse_misfit(6)


def test_attention_outside_of_a_model_is_refused() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(mk.errors.PlanError, match="attention ran outside of the model's forward"):
        _attend_dot_products(q, q, q)


def mismatched_masks() -> str:
    run = mk.parallelize(build(Cell(mesh="")), mesh_for("cp=2"), plan=mk.models.LLAMA_PLAN)
    try:
        run.forward_backward({"input_ids": IDS, "labels": IDS}, mask=[Mask.causal(TOKENS)] * 3)
    except mk.errors.DataError as error:
        return str(error)
    return "no error"


def test_a_run_takes_a_mask_for_each_row() -> None:
    for found in pool(2).run(mismatched_masks):
        assert found == "batch: 3 masks for 2 rows. Give one Mask, or one for each row."


# --------------------------------------------------------------------------------------------------------- and no hang


@pytest.mark.parametrize(("scheme", "error"), [("ring", "plan"), ("group_cast", "python")])
def test_a_rank_that_fails_in_a_hop_ends_all_with_its_error(scheme: str, error: str, monkeypatch) -> None:
    monkeypatch.setitem(os.environ, "MESHKIT_TEST_SCHEME", scheme)
    monkeypatch.setitem(os.environ, "MESHKIT_TEST_ERROR", error)
    start = time.monotonic()
    status, output = launch(3, "tests/recipes/one_rank_fails_in_a_hop.py", timeout_s=60)
    assert status != 0
    expected = (
        "PlanError (rank 1): this kernel has had enough" if error == "plan" else "RuntimeError: this kernel has had"
    )
    assert expected in output, output
    assert time.monotonic() - start < 60
