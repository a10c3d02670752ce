"""Log-probabilities of labels and entropies of predictions, and gradients through both, against torch.distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributions import Categorical

import meshkit as mk
from meshkit.core.sharding import chunk, full_tensor
from meshkit.loss import log_sum_squares
from meshkit.loss.linear_logits import Head, LinearLogits, sharded_logits
from meshkit.parallel.tensor.local import shard_parameter
from meshkit.preflight.observe import Peak
from tests.laws.parity.cases import mesh_for
from tests.loss.test_chunked import heads, inputs
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of sums differs


def oracle(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    predicted, valid = Categorical(logits=logits / temperature), labels != -100
    return predicted.log_prob(labels.clamp(min=0)) * valid, predicted.entropy() * valid


def weighted(found: tuple[Tensor, Tensor]) -> Tensor:
    """A scalar in which every log-probability and every entropy counts differently."""
    factors = torch.linspace(-1, 2, 2 * found[0].numel(), dtype=torch.float64).view(2, *found[0].shape)
    return (factors[0] * found[0]).sum() + (factors[1] * found[1]).sum()


def differences(mine: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_of_chunks_are_those_of_torch(bias: bool, temperature: float) -> None:
    plain, chunked = heads(8, 13, bias=bias, tokens=5, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    ours, theirs = (hidden * 20).requires_grad_(), (hidden * 20).requires_grad_()
    found = mk.loss.token_log_probs(chunked(ours), labels, temperature=temperature)
    expected = oracle(plain(theirs), labels, temperature)
    weighted(found).backward()
    weighted(expected).backward()
    assert isinstance(found, mk.loss.TokenLogProbs) and found.log_probs.shape == labels.shape
    mine = [*found, ours.grad, *(param.grad for param in chunked.parameters())]
    assert differences(mine, [*expected, theirs.grad, *(param.grad for param in plain.parameters())]) <= TOL_FP64


def test_values_and_gradients_of_whole_logits_are_those_of_torch() -> None:
    _, labels = inputs(2, 7, 8, 13, torch.float64)
    ours = (torch.randn(2, 7, 13, dtype=torch.float64) * 20).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    before = ours.detach().clone()
    found, expected = mk.loss.token_log_probs(ours, labels, temperature=1.7), oracle(theirs, labels, 1.7)
    weighted(found).backward()
    weighted(expected).backward()
    assert differences([*found, ours.grad], [*expected, theirs.grad]) <= TOL_FP64
    assert ours.equal(before), "the logits were written over"


def test_whole_logits_in_bf16_have_the_gradient_of_fp32_rounded_once() -> None:
    """With ignored labels, which a CPU leaves out by an index, and without, by slices."""
    for _, labels in (inputs(2, 7, 8, 13, torch.float64), (None, torch.arange(13)[None])):
        ours = torch.randn(*labels.shape, 13).bfloat16().requires_grad_()
        theirs = ours.detach().float().requires_grad_()
        for logits in (ours, theirs):
            weighted(mk.loss.token_log_probs(logits, labels)).backward()
        assert ours.grad.equal(theirs.grad.bfloat16())


def test_log_sum_squares_of_chunks_and_of_whole_logits_are_the_closed_form() -> None:
    plain, chunked = heads(8, 13, bias=True, tokens=5, dtype=torch.float64)
    hidden, _ = inputs(2, 7, 8, 13, torch.float64)
    logits = plain(hidden * 20)
    expected = logits.softmax(-1).square().sum(-1).log()
    for given in (logits, chunked(hidden * 20)):
        found = log_sum_squares(given)
        assert not found.requires_grad and differences([found], [expected]) <= TOL_FP64


def test_their_sum_is_the_cross_entropy() -> None:
    _, chunked = heads(8, 13, bias=True, tokens=5, dtype=torch.float64)
    hidden, labels = inputs(2, 7, 8, 13, torch.float64)
    found = []
    for loss in (lambda out: mk.cross_entropy(out, labels), lambda out: -mk.loss.token_log_probs(out, labels)[0].sum()):
        chunked.zero_grad()
        own = hidden.clone().requires_grad_()
        value = loss(chunked(own))
        value.backward()
        found.append([value, own.grad, *(param.grad.clone() for param in chunked.parameters())])
    assert differences(*found) <= TOL_FP64


def test_tokens_that_cannot_be_chosen_count_nothing() -> None:
    labels = torch.tensor([[0, 2, -100]])
    logits = torch.randn(1, 3, 5, dtype=torch.float64)
    logits[..., 3] = -torch.inf
    without = torch.cat([logits[..., :3], logits[..., 4:]], dim=-1).requires_grad_()
    logits.requires_grad_()
    found, expected = mk.loss.token_log_probs(logits, labels), oracle(without, labels, 1.0)
    weighted(found).backward()
    weighted(expected).backward()
    assert differences(list(found), list(expected)) <= TOL_FP64
    assert logits.grad is not None and without.grad is not None and not logits.grad[..., 3].any()
    assert differences([logits.grad[..., [0, 1, 2, 4]]], [without.grad]) <= TOL_FP64


def test_an_odd_temperature_is_refused() -> None:
    with pytest.raises(mk.errors.PlanError, match="temperature=0"):
        mk.loss.token_log_probs(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), temperature=0)


def test_the_peak_does_not_follow_the_logits() -> None:
    features, vocabulary = 32, 1002
    plain, chunked = heads(features, vocabulary, bias=False, tokens=8, dtype=torch.float32)
    peaks = []
    for model, tokens in ((plain, 256), (chunked, 256), (chunked, 512)):
        hidden, labels = inputs(1, tokens, features, vocabulary, torch.float32)
        hidden.requires_grad_()
        with Peak() as held:
            found = mk.loss.token_log_probs(model(hidden), labels)
            (found.log_probs + found.entropy).sum().backward()
        peaks.append(held.bytes)
    assert peaks[1] <= peaks[0] / 4
    assert peaks[2] - peaks[1] <= 256 * 4 * (features + 20)


# ----------------------------------------------------------------------------------------- vocabulary over ranks


def errors_over_ranks(vocabulary: int) -> tuple[float, float, float, float]:
    """(of a chunked head, of its cross-entropy, of whole logits, of log_sum_squares).

    Each rank has its part of the vocabulary, maybe none.
    """
    torch.manual_seed(1)
    axis = mesh_for("tp=4")["tp"]
    own = chunk(vocabulary, 4, axis.get_local_rank())
    hidden, labels = inputs(2, 9, 8, vocabulary, torch.float64)
    weight, bias = torch.randn(vocabulary, 8, dtype=torch.float64), torch.randn(vocabulary, dtype=torch.float64)
    whole = [tensor.clone().requires_grad_() for tensor in (hidden * 10, weight, bias)]
    logits = nn.functional.linear(*whole)
    logits.retain_grad()
    expected = oracle(logits, labels, 0.8)
    weighted(expected).backward()

    mine = [tensor.clone().requires_grad_() for tensor in (hidden * 10, weight[own], bias[own])]
    head = Head(mine[1], mine[2], loss=mk.strategy.ChunkedLoss(tokens=5), vocabulary=vocabulary, axis=axis)
    found = mk.loss.token_log_probs(LinearLogits(mine[0], head), labels, temperature=0.8)
    weighted(found).backward()
    torch.distributed.all_reduce(mine[0].grad, group=axis.get_group())  # what entering the axis does
    grads = [whole[0].grad, whole[1].grad[own], whole[2].grad[own]]
    chunked = max(differences(list(found), list(expected)), _worst([tensor.grad for tensor in mine], grads))

    for tensor in (*whole, *mine):
        tensor.grad = None
    expected_loss = nn.functional.cross_entropy(
        nn.functional.linear(*whole).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    expected_loss.backward()
    loss = mk.cross_entropy(LinearLogits(mine[0], head), labels)
    loss.backward()
    torch.distributed.all_reduce(mine[0].grad, group=axis.get_group())
    grads = [whole[0].grad, whole[1].grad[own], whole[2].grad[own]]
    summed = max(differences([loss], [expected_loss]), _worst([tensor.grad for tensor in mine], grads))

    split = shard_parameter(logits, axis, Shard(2)).requires_grad_()
    found = mk.loss.token_log_probs(split, labels, temperature=0.8)
    weighted(found).backward()
    whole_logits = differences([*found, full_tensor(split.grad)], [*expected, logits.grad])

    sharp = logits.softmax(-1).square().sum(-1).log()
    forms = (split, LinearLogits(mine[0], head))
    return chunked, summed, whole_logits, differences([log_sum_squares(form) for form in forms], [sharp, sharp])


def _worst(mine: list[Tensor], theirs: list[Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True) if a.numel()), default=0.0)


@pytest.mark.parametrize("vocabulary", [16, 13, 3])
def test_a_vocabulary_over_ranks_gives_the_same(vocabulary: int) -> None:
    for found in pool(4).run(errors_over_ranks, vocabulary):
        assert max(found) <= TOL_FP64


def labels_on_no_rank() -> tuple[bool, bool]:
    axis = mesh_for("tp=4")["tp"]
    own = chunk(13, 4, axis.get_local_rank())
    hidden, labels = torch.randn(3, 8), torch.tensor([13, 2, -100])
    head = Head(torch.randn(13, 8)[own], None, loss=mk.strategy.ChunkedLoss(), vocabulary=13, axis=axis)
    logits = LinearLogits(hidden, head)
    made = logits.to_logits()
    assert made.shape == (3, 13) and made.placements == sharded_logits(made.to_local(), axis, 13).placements
    return bool(mk.cross_entropy(logits, labels).isnan()), bool(mk.cross_entropy(made, labels).isnan())


def test_a_label_on_no_rank_is_not_missed() -> None:
    for found in pool(4).run(labels_on_no_rank):
        assert found == (True, True)
