"""Head and cross-entropy in chunks: values and gradients are those of whole logits, which are never made."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshkit as mk
from meshkit.core._torch import TorchDispatchMode
from meshkit.loss.chunked import liger_cross_entropy
from meshkit.loss.linear_logits import chunk_head, plan_head
from meshkit.plan import vocab
from meshkit.preflight.observe import Peak
from meshkit.strategy import ChunkedLoss

TOL_FP64 = 1e-10  # only the order of sums over chunks differs
BF16_RATIO = 2.0  # at most twice the error of whole logits


def heads(
    features: int, vocabulary: int, *, bias: bool, tokens: int, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module]:
    """A model of one head, plain and chunked, with the same values."""
    torch.manual_seed(0)
    plain = nn.Sequential()
    plain.add_module("lm_head", nn.Linear(features, vocabulary, bias=bias, dtype=dtype))
    chunked = copy.deepcopy(plain)
    loss = ChunkedLoss(tokens=tokens)
    chunk_head(chunked.lm_head, loss)
    return plain, chunked


def inputs(rows: int, tokens: int, features: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(rows, tokens, features, dtype=dtype)
    labels = torch.randint(0, vocabulary, (rows, tokens))
    labels[torch.rand(labels.shape) < 0.3] = -100
    return hidden, labels


def step(model: nn.Module, hidden: Tensor, labels: Tensor, scale: float = 0.7) -> tuple[Tensor, list[Tensor]]:
    hidden = hidden.clone().requires_grad_()
    loss = mk.cross_entropy(model(hidden), labels)
    model.zero_grad()
    (loss * scale).backward()
    return loss.detach(), [hidden.grad, *(param.grad for param in model.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 14, 100])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int, bias: bool) -> None:
    plain, chunked = heads(8, 13, bias=bias, tokens=chunk, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    (loss, grads), (own, own_grads) = step(plain, hidden * 30, labels), step(chunked, hidden * 30, labels)
    assert own.dtype == torch.float64 and abs(own - loss) <= TOL_FP64 * loss
    for grad, own_grad in zip(grads, own_grads, strict=True):
        assert own_grad.dtype == grad.dtype
        assert (grad - own_grad).abs().max() <= TOL_FP64


def test_tokens_whose_label_is_ignored_have_no_logits() -> None:
    _, chunked = heads(8, 13, bias=True, tokens=4, dtype=torch.float64)
    hidden, labels = inputs(2, 50, 8, 13, torch.float64)
    valid = int((labels != -100).sum())
    sizes: list[int] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.default:  # logits, with their bias
                sizes.append(len(args[1]))
            return func(*args, **(kwargs or {}))

    own = hidden.clone().requires_grad_()
    with Products():
        mk.cross_entropy(chunked(own), labels).backward()
    assert sum(sizes) == valid < labels.numel() and max(sizes) == 4
    assert not own.grad[labels == -100].any()
    sizes.clear()
    with Products():
        found = mk.loss.token_log_probs(chunked(own), labels)
        (found.log_probs.sum() + found.entropy.sum()).backward()
    assert sum(sizes) == 2 * valid  # once in each direction


def test_labels_that_are_all_ignored_give_zeros() -> None:
    _, chunked = heads(8, 13, bias=True, tokens=3, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    loss, grads = step(chunked, hidden, torch.full_like(labels, -100))
    assert loss == 0 and all(not grad.any() for grad in grads)


def test_a_label_outside_of_the_vocabulary_is_not_missed() -> None:
    _, chunked = heads(8, 13, bias=False, tokens=3, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    for wrong in (13, -1):
        labels[1, 2] = wrong
        assert mk.cross_entropy(chunked(hidden), labels).isnan()


def test_a_head_used_twice_and_a_graph_kept_give_the_sum() -> None:
    plain, chunked = heads(8, 13, bias=True, tokens=4, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    found = []
    for model in (plain, chunked):
        own = hidden.clone().requires_grad_()
        loss = mk.cross_entropy(model(own), labels) + 0.3 * mk.cross_entropy(model(own.tanh()), labels.flip(0))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([own.grad, *(param.grad for param in model.parameters())])
    for grad, own_grad in zip(*found, strict=True):
        assert (grad - own_grad).abs().max() <= TOL_FP64


def test_what_is_frozen_gets_no_gradient_and_without_gradients_there_is_only_the_loss() -> None:
    _, chunked = heads(8, 13, bias=True, tokens=4, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    expected = mk.cross_entropy(chunked(hidden), labels)
    with torch.no_grad(), Peak() as kept:
        loss = mk.cross_entropy(chunked(hidden), labels)
    assert loss == expected and not loss.requires_grad
    assert kept.bytes < 3 * 4 * 13 * 8 + 500, "a gradient was made"
    chunked.lm_head.weight.requires_grad_(False)
    _, grads = step(chunked, hidden, labels)
    assert grads[0] is not None and grads[1] is None and grads[2] is not None
    loss = mk.cross_entropy(chunked(hidden), labels)  # a head alone is trained
    loss.backward()


def test_bf16_is_as_exact_as_with_whole_logits() -> None:
    exact = heads(64, 300, bias=True, tokens=1, dtype=torch.float64)[0]
    hidden, labels = inputs(4, 64, 64, 300, torch.float64)
    _, expected = step(exact, hidden, labels)
    errors = []
    for model in heads(64, 300, bias=True, tokens=10, dtype=torch.bfloat16):
        model.load_state_dict(exact.state_dict())
        _, grads = step(model, hidden.bfloat16(), labels)
        assert all(grad.dtype == torch.bfloat16 for grad in grads)
        errors.append(
            [float((own.double() - grad).norm() / grad.norm()) for own, grad in zip(grads, expected, strict=True)]
        )
    for whole, own in zip(*errors, strict=True):
        assert whole > 1e-4 and own <= BF16_RATIO * whole


# ------------------------------------------------------------------------------------------------------------- memory


def peak_bytes(model: nn.Module, hidden: Tensor, labels: Tensor) -> int:
    """Of head and loss, forward and backward, over what was there before."""
    hidden = hidden.clone().requires_grad_()
    with Peak() as held:
        mk.cross_entropy(model(hidden), labels).backward()
    return held.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_an_eighth_of_whole_logits_at_the_ratios_of_llama_3_at_32k(dtype: torch.dtype) -> None:
    features = 32  # a 128th of 4096; vocabulary, tokens and chunk in proportion
    vocabulary, tokens, chunk = 128_256 * features // 4096, 32_768 * features // 4096, 1024 * features // 4096
    plain, chunked = heads(features, vocabulary, bias=False, tokens=chunk, dtype=dtype)
    hidden, labels = inputs(1, tokens, features, vocabulary, dtype)
    whole, own = peak_bytes(plain, hidden, labels), peak_bytes(chunked, hidden, labels)
    print(f"{dtype}: {whole:,} bytes with whole logits, {own:,} in chunks, {whole / own:.1f} times")
    assert own <= whole / 8


def test_the_peak_follows_the_hidden_state_and_not_the_logits() -> None:
    features, vocabulary, chunk = 32, 1002, 8
    _, chunked = heads(features, vocabulary, bias=False, tokens=chunk, dtype=torch.float32)
    peaks = []
    for tokens in (256, 512, 1024):
        hidden, labels = inputs(1, tokens, features, vocabulary, torch.float32)
        peaks.append(peak_bytes(chunked, hidden, labels))
    # What grows by a token: its gradient, once as it was made and once scaled, in fp32. Its logits would be 31 times that.
    for fewer, more, tokens in zip(peaks, peaks[1:], (256, 512), strict=False):
        assert more - fewer <= tokens * 2 * 4 * features


# ----------------------------------------------------------------------------------------------- what a head returns


def test_tokens_of_linear_logits_are_those_of_the_logits() -> None:
    plain, chunked = heads(8, 13, bias=True, tokens=4, dtype=torch.float64)
    hidden, _ = inputs(2, 7, 8, 13, torch.float64)
    whole, own = plain(hidden), chunked(hidden)
    assert isinstance(own, mk.loss.LinearLogits) and own.shape == whole.shape
    assert own.to_logits().equal(whole)
    assert (own[1, 2:4].to_logits() - whole[1, 2:4]).abs().max() <= TOL_FP64
    assert (own[hidden[..., 0] > 0].to_logits() - whole[hidden[..., 0] > 0]).abs().max() <= TOL_FP64
    with pytest.raises(IndexError, match="an index takes tokens, of its first 2 dims"):
        own[0, 1, 2]
    with pytest.raises(AttributeError, match=r"has no 'argmax'.*makes no logits"):
        own.argmax(-1)


def test_a_weight_that_fsdp_has_freed_is_refused() -> None:
    _, chunked = heads(8, 13, bias=False, tokens=4, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    logits = chunked(hidden)
    chunked.lm_head.weight.untyped_storage().resize_(0)
    with pytest.raises(mk.errors.StepError, match="the head's weight has been freed"):
        mk.cross_entropy(logits, labels)
    with pytest.raises(mk.errors.StepError, match="the head's weight has been freed"):
        mk.loss.token_log_probs(logits, labels)


def test_labels_that_do_not_fit_are_refused() -> None:
    _, chunked = heads(8, 13, bias=False, tokens=4, dtype=torch.float64)
    with pytest.raises(mk.errors.PlanError, match=r"logits \(2, 3, 13\) and labels \(2, 4\) do not fit"):
        mk.cross_entropy(chunked(torch.zeros(2, 3, 8, dtype=torch.float64)), torch.zeros(2, 4, dtype=torch.int64))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 5)


class OwnHead(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) / 2


class Embedder(TwoHeads):
    def get_output_embeddings(self) -> nn.Module:
        return self.second


def test_heads_are_found_by_the_plan_by_their_model_or_by_name() -> None:
    def found(model: nn.Module, plan: mk.Plan | None = None, **choices: object) -> str:
        options = {"tp": 1, "sequence": False, "device_type": "cpu", **choices}
        return plan_head(model, plan or mk.Plan(), mk.strategy.ChunkedLoss(), **options)  # type: ignore[arg-type]

    assert found(TwoHeads(), mk.Plan(tensor={"second": vocab()})) == "second"
    assert found(Embedder()) == "second"
    assert found(Embedder(), mk.Plan(tensor={"first": vocab()})) == "first"
    assert found(nn.ModuleDict({"lm_head": nn.Linear(2, 3), "up": nn.Linear(2, 3)})) == "lm_head"
    with pytest.raises(mk.errors.PlanError, match="no head in TwoHeads. Give the one linear layer"):
        found(TwoHeads())
    with pytest.raises(mk.errors.PlanError, match=r"several heads, \['first', 'second'\]"):
        found(TwoHeads(), mk.Plan(tensor={"*": vocab()}))
    with pytest.raises(mk.errors.PlanError, match="'lm_head' is a OwnHead with a forward of its own"):
        found(nn.ModuleDict({"lm_head": OwnHead(2, 3)}))
    with pytest.raises(mk.errors.PlanError, match=r"with tp=2 the head 'lm_head' is column\(\) in the plan"):
        found(nn.ModuleDict({"lm_head": nn.Linear(2, 3)}), mk.Plan(tensor={"*": mk.plan.column()}), tp=2)


@pytest.mark.parametrize(
    ("choice", "match"),
    [({"tokens": 0}, r"tokens=0\): a chunk has at least one"), ({"backend": "cce"}, "choose 'torch' or 'liger'")],
)
def test_odd_choices_are_refused(choice: dict, match: str) -> None:
    with pytest.raises(mk.errors.PlanError, match=match):
        mk.strategy.ChunkedLoss(**choice)


# -------------------------------------------------------------------------------------------------------------- liger


def test_liger_is_refused_with_the_reason() -> None:
    def ask(tp: int, device: str) -> None:
        loss = mk.strategy.ChunkedLoss(backend="liger")
        model = nn.ModuleDict({"lm_head": nn.Linear(2, 3)})
        plan_head(model, mk.Plan(), loss, tp=tp, sequence=False, device_type=device)

    with pytest.raises(mk.errors.PlanError, match="has kernels for GPUs, but the mesh is on cpu"):
        ask(1, "cpu")
    with pytest.raises(mk.errors.PlanError, match="needs the whole vocabulary on each rank, but tp=2"):
        ask(2, "cuda")
    if find_spec("liger_kernel") is None:
        with pytest.raises(mk.errors.PlanError, match="liger-kernel is not installed"):
            ask(1, "cuda")


def test_liger_gives_the_same_in_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with TRITON_INTERPRET=1: kernels on tensors of the host."""
    pytest.importorskip("liger_kernel")
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET=1 is not set")
    plain, chunked = heads(8, 13, bias=True, tokens=4, dtype=torch.float32)
    hidden, labels = inputs(2, 7, 8, 13, torch.float32)
    expected, grads = step(plain, hidden, labels)
    own = hidden.clone().requires_grad_()
    logits = chunked(own)
    loss = liger_cross_entropy(logits.hidden.flatten(0, -2), logits.head, labels.flatten())
    (loss * 0.7).backward()
    assert abs(loss - expected) <= 1e-5 * expected
    for grad, own_grad in zip(grads, [own.grad, *(param.grad for param in chunked.parameters())], strict=True):
        assert (grad - own_grad).abs().max() <= 1e-5
