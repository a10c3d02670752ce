"""Divergences of distillation and their gradients, against sums over whole distributions that autograd differentiates."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from meshkit.core.sharding import chunk
from meshkit.errors import DataError, PlanError
from meshkit.loss import Divergence, Teacher, token_divergences, top_log_probs
from meshkit.loss.linear_logits import sharded_logits
from tests.laws.parity.cases import mesh_for
from tests.loss.test_chunked import heads, inputs
from tests.world import pool

TOL_FP64 = 1e-10  # only the order of sums differs
TOL_FP32 = 3e-5  # a few roundings of logits up to 150
KINDS = [
    Divergence(kind="forward"),
    Divergence(kind="reverse", temperature=0.6),
    Divergence(kind="jsd", beta=0.3, temperature=1.7),
]
FEATURES, VOCABULARY = 8, 13


def oracle(logits: Tensor, labels: Tensor, teacher: Tensor, divergence: Divergence, top: int | None) -> Tensor:
    """Of the teacher's logits: all but its `top` tokens are one outcome."""
    log_q, log_p = ((each / divergence.temperature).log_softmax(-1) for each in (logits, teacher))
    if top is not None and top < VOCABULARY:
        kept = log_p.topk(top, dim=-1).indices
        is_kept = torch.zeros(log_p.shape, dtype=torch.bool).scatter_(-1, kept, True)
        log_p, log_q = (
            torch.cat([each.gather(-1, kept), each.masked_fill(is_kept, -torch.inf).logsumexp(-1, keepdim=True)], -1)
            for each in (log_p, log_q)
        )
    beta = divergence.beta
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    parts = {
        "forward": log_p.exp() * (log_p - log_q),
        "reverse": log_q.exp() * (log_q - log_p),
        "jsd": beta * log_p.exp() * (log_p - log_m) + (1 - beta) * log_q.exp() * (log_q - log_m),
    }
    return parts[divergence.kind].sum(-1) * (labels != -100)


def weighted(losses: Tensor) -> Tensor:
    """A scalar in which every token counts differently."""
    return (torch.linspace(-1, 2, losses.numel(), dtype=losses.dtype).view(losses.shape) * losses).sum()


def told(teacher: Tensor, divergence: Divergence, top: int | None) -> Teacher:
    return top_log_probs(teacher, top, temperature=divergence.temperature)


@pytest.mark.parametrize("top", [None, 1, 4, VOCABULARY])
@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
def test_values_and_gradients_are_those_of_whole_distributions(divergence: Divergence, top: int | None) -> None:
    plain, chunked = heads(FEATURES, VOCABULARY, bias=True, tokens=5, dtype=torch.float64)
    hidden, labels = inputs(2, 7, FEATURES, VOCABULARY, torch.float64)
    teacher = torch.randn(2, 7, VOCABULARY, dtype=torch.float64) * 3
    ours, theirs, whole = (hidden.clone().requires_grad_() for _ in range(3))
    expected = oracle(plain(theirs), labels, teacher, divergence, top)
    weighted(expected).backward()
    found = token_divergences(chunked(ours), labels, told(teacher, divergence, top), divergence)
    weighted(found).backward()
    pairs = [(found, expected), (ours.grad, theirs.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(chunked.parameters(), plain.parameters(), strict=True)]
    for parameter in plain.parameters():
        parameter.grad = None
    of_logits = token_divergences(plain(whole), labels, told(teacher, divergence, top), divergence)
    weighted(of_logits).backward()
    pairs += [(of_logits, expected), (whole.grad, theirs.grad)]
    for one, other in pairs:
        assert one is not None and other is not None
        assert float((one.detach() - other.detach()).abs().max()) <= TOL_FP64


@pytest.mark.parametrize("top", [1, 4])
@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
@pytest.mark.parametrize(("student_peak", "teacher_peak"), [(0.0, 60.0), (60.0, 0.0), (60.0, 60.0), (0.0, 150.0)])
def test_peaked_distributions_keep_their_digits_in_fp32(
    student_peak: float, teacher_peak: float, divergence: Divergence, top: int
) -> None:
    """All other tokens together may have a share of e^-150: 1 less the rest is then 0 or a rounding error."""
    hidden, labels = torch.randn(6, VOCABULARY), torch.zeros(6, dtype=torch.int64)
    teacher = torch.randn(6, VOCABULARY)
    hidden[:, 2] += student_peak
    teacher[:, 5] += teacher_peak
    ours, theirs = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    expected = oracle(theirs, labels, teacher.double(), divergence, top)
    expected.sum().backward()
    found = token_divergences(ours, labels, told(teacher, divergence, top), divergence)
    found.sum().backward()
    assert ours.grad is not None and theirs.grad is not None
    torch.testing.assert_close(found.double(), expected, rtol=TOL_FP32, atol=TOL_FP32)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=TOL_FP32, atol=TOL_FP32)


def test_what_is_said_of_ignored_labels_is_not_read() -> None:
    _, labels = inputs(2, 7, FEATURES, VOCABULARY, torch.float64)
    labels[0, 2:] = -100
    logits = torch.randn(2, 7, VOCABULARY, dtype=torch.float64).requires_grad_()
    poisoned = torch.where(
        labels.unsqueeze(-1) == -100, torch.nan, torch.randn(2, 7, VOCABULARY).log_softmax(-1).double()
    )
    losses = token_divergences(logits, labels, Teacher(poisoned), Divergence(kind="reverse"))
    losses.sum().backward()
    assert losses.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    assert float(logits.grad[labels == -100].abs().max()) == 0 < float(logits.grad.abs().max())


def test_the_divergence_of_a_distribution_from_itself_is_nothing() -> None:
    logits = torch.randn(3, VOCABULARY, dtype=torch.float64).requires_grad_()
    for divergence in KINDS:
        losses = token_divergences(
            logits, torch.zeros(3, dtype=torch.int64), told(logits.detach(), divergence, None), divergence
        )
        (grad,) = torch.autograd.grad(losses.sum(), logits)
        assert float(losses.detach().abs().max()) < TOL_FP64 and float(grad.abs().max()) < TOL_FP64


@pytest.mark.parametrize("top", [None, 1, 4, VOCABULARY])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_log_probabilities_of_whatever_size_are_counted_in_full(
    kind: Literal["forward", "reverse", "jsd"], top: int | None
) -> None:
    """At a temperature near 0, or of logits in the thousands, a token may have e^-100000."""
    divergence = Divergence(kind=kind, beta=0.3, temperature=0.001)
    student, teacher = torch.randn(2, 6, VOCABULARY, dtype=torch.float64) * 30
    labels = torch.zeros(6, dtype=torch.int64)
    expected = oracle(student, labels, teacher, divergence, top)
    found = token_divergences(student, labels, told(teacher, divergence, top), divergence)
    assert kind == "jsd" or float(expected.max()) > 1e4
    torch.testing.assert_close(found, expected, rtol=TOL_FP64, atol=TOL_FP64)


@pytest.mark.parametrize("top", [None, 2, 50])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_of_no_predictions_nothing_is_told(shape: tuple[int, ...], top: int | None) -> None:
    logits = torch.zeros(*shape, VOCABULARY, requires_grad=True)
    teacher = top_log_probs(logits, top)
    assert teacher.log_probs.shape == (*shape, VOCABULARY if top is None else min(top, VOCABULARY))
    losses = token_divergences(logits, torch.zeros(shape, dtype=torch.int64), teacher, Divergence())
    losses.sum().backward()
    assert losses.shape == shape and logits.grad is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "kl"}, "kind='kl' is not known"),
        ({"beta": 1.0}, "beta=1.0"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_a_divergence_that_is_none_is_refused(options: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Divergence(**options)
    with pytest.raises(DataError, match=r"the teacher's log_probs are \(2, 5\), and the student's logits \(2, 13\)"):
        token_divergences(torch.zeros(2, 13), torch.zeros(2, dtype=torch.int64), Teacher(torch.zeros(2, 5)), KINDS[0])
    with pytest.raises(DataError, match=r"the teacher's rest is none, and the labels \(2,\)"):
        told_some = Teacher(torch.zeros(2, 5), torch.zeros(2, 5, dtype=torch.int64))
        token_divergences(torch.zeros(2, 13), torch.zeros(2, dtype=torch.int64), told_some, KINDS[0])


# ---------------------------------------------------------------------------------------------- vocabulary-parallel


def on_ranks(vocabulary: int, top: int | None, divergence: Divergence) -> float:
    """The largest difference to whole logits: of values, of gradients, and of what the sharded teacher tells."""
    axis = mesh_for("tp=4")["tp"]
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, vocabulary, dtype=torch.float64) * 3
    labels = torch.tensor([[1, -100, 2, 3, 0]] * 3)
    whole = student.clone().requires_grad_()
    said = top_log_probs(teacher, top, temperature=divergence.temperature)
    weighted(token_divergences(whole, labels, said, divergence)).backward()
    own = chunk(vocabulary, axis.size(), axis.get_local_rank())
    local = student[..., own].clone().requires_grad_()
    found = top_log_probs(sharded_logits(teacher[..., own], axis, vocabulary), top, temperature=divergence.temperature)
    losses = token_divergences(sharded_logits(local, axis, vocabulary), labels, found, divergence)
    weighted(losses).backward()
    assert whole.grad is not None and local.grad is not None
    gaps = [(local.grad - whole.grad[..., own]), found.log_probs - said.log_probs]
    if found.ids is not None and said.ids is not None and found.rest is not None and said.rest is not None:
        gaps.append((found.ids - said.ids).double())
        gaps.append((found.rest.exp() - said.rest.exp()).double())  # -inf where there is no rest
    gaps.append(losses.detach() - token_divergences(student, labels, said, divergence))
    return max(float(gap.abs().max()) if gap.numel() else 0.0 for gap in gaps)


@pytest.mark.parametrize("top", [None, 3, 61])
@pytest.mark.parametrize("divergence", KINDS, ids=lambda each: each.kind)
def test_a_sharded_vocabulary_has_the_same_values_and_gradients(divergence: Divergence, top: int | None) -> None:
    for vocabulary in (61, 3):  # uneven parts; one rank without any
        kept = None if top is None else min(top, vocabulary)
        assert max(pool(4).run(on_ranks, vocabulary, kept, divergence)) <= TOL_FP64


def ids_on_ranks(vocabulary: int, top: int) -> tuple[list[int], float]:
    """What a sharded teacher tells that can say three tokens only, and the student's divergence from it."""
    axis = mesh_for("tp=4")["tp"]
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 1, vocabulary, dtype=torch.float64)
    teacher[:, 3:] = -torch.inf
    own = chunk(vocabulary, axis.size(), axis.get_local_rank())
    said = top_log_probs(sharded_logits(teacher[:, own], axis, vocabulary), top)
    logits = sharded_logits(student[:, own], axis, vocabulary)
    losses = token_divergences(logits, torch.zeros(1, dtype=torch.int64), said, Divergence())
    log_p, log_q = teacher.log_softmax(-1)[0, :3], student.log_softmax(-1)[0, :3]
    assert said.ids is not None
    return said.ids[0].tolist(), float(losses) - float((log_p.exp() * (log_p - log_q)).sum())


@pytest.mark.parametrize("top", [3, 5, 6, 13])
def test_a_teacher_on_ranks_tells_of_a_token_once_where_others_are_impossible(top: int) -> None:
    for ids, gap in pool(4).run(ids_on_ranks, VOCABULARY, top):
        assert len(set(ids)) == len(ids) == top and set(ids) >= {0, 1, 2} and set(ids) <= set(range(VOCABULARY))
        assert abs(gap) <= TOL_FP64
