"""DPO and its family (IPO, AOT, ORPO, SimPO, ...): one sequence-level loss for each pair, computed in fp64.

Notation: w = log pi - log pi_ref of the chosen answer, l of the rejected one, u = w - l; all are sums over tokens.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from meshkit.algos.preference._pairs import Pairs, PreferenceValues
from meshkit.errors import DataError, PlanError

DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """A preference objective and its constants. A constant that the kind does not use is refused.

    kind: one of `PREFERENCE_KINDS`; docs/objectives.md has their formulas and sources.
    weight: of the loss in a mix of several.
    beta: the strength of the pull to the reference; ORPO's lambda; IPO's tau. Not for nll and sft.
    label_smoothing: the share of pairs assumed to be labelled wrongly. With kind "sigmoid" this is cDPO.
    average: scores are divided by the tokens of their answer; with "sigmoid" TRL's sigmoid_norm.
    divergence: between policy and reference, `alpha` for "alpha" (0 is forward and 1 reverse KL). The score of an answer is
    f'(pi / pi_ref); beyond a ratio of e^30 it continues linearly, so that it and its gradient stay finite.
    Source: Wang et al. 2023 (2309.16240), table 1.
    tau: DiscoPOP's temperature. margin: SimPO's gamma, which beta does not multiply.
    Raises: PlanError for an unknown kind, and for constants out of range or without use.
    """

    kind: str = "sigmoid"
    weight: float = 1.0
    beta: float = 0.1
    label_smoothing: float = 0.0
    average: bool = False
    divergence: str = "reverse_kl"
    alpha: float = 0.5
    tau: float = 0.05
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise PlanError(f"PreferenceLoss: kind={self.kind!r} is not known. {_near(self.kind, PREFERENCE_KINDS)}")
        # A constant without effect would pass for one that was used: the table of kinds says which each one reads.
        used = {"kind", "weight", *_KINDS[self.kind].options}
        unused = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name not in used and getattr(self, field.name) != field.default
        ]
        if unused:
            takes = ", ".join(_KINDS[self.kind].options) or "only a weight"
            raise PlanError(f"PreferenceLoss: kind={self.kind!r} has no use for {', '.join(unused)}. It takes {takes}.")
        if self.divergence not in DIVERGENCES:
            raise PlanError(
                f"PreferenceLoss: divergence={self.divergence!r} is not known. {_near(self.divergence, DIVERGENCES)}"
            )
        if self.alpha != 0.5 and self.divergence != "alpha":
            raise PlanError(f"PreferenceLoss: alpha={self.alpha} is for divergence='alpha'. Leave it out.")
        if self.beta <= 0:
            raise PlanError(f"PreferenceLoss: beta={self.beta} removes or turns round the preference. Use more than 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise PlanError(
                f"PreferenceLoss: label_smoothing={self.label_smoothing} is the share of wrong labels. Use 0 to below 0.5."
            )
        if self.kind == "exo" and self.label_smoothing == 0:
            raise PlanError(
                "PreferenceLoss: kind='exo' is infinite for label_smoothing=0. Use a small one, such as 1e-3."
            )
        if not 0 < self.tau <= 1:
            raise PlanError(f"PreferenceLoss: tau={self.tau} gives a loss that grows without end. Use (0, 1].")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.kind not in _WITHOUT_REFERENCE


def preference_loss(pairs: Pairs, *losses: PreferenceLoss) -> PreferenceValues:
    """Loss and rewards of each pair; several losses are added by their weights (MPO, Wang et al. 2024, 2411.10442).

    The losses of any split of a step's pairs add up to those of all, if its parts share what `Pairs` says they must.
    Rewards have the beta of the first loss.
    Raises: DataError if Pairs lacks an input of an objective; PlanError without a loss, and for weights with AOT, whose
    sorted values belong to no pair.
    """
    if not losses:
        raise PlanError("preference_loss: no loss. Give at least one, for example PreferenceLoss(kind='sigmoid').")
    # fp64: u is a small difference of sums over hundreds of tokens.
    total = torch.zeros_like(pairs.chosen, dtype=torch.float64)
    for loss in losses:
        values = _KINDS[loss.kind].function(pairs, loss)
        if pairs.weights is not None:
            if loss.kind.startswith("aot"):
                raise PlanError(
                    f"preference_loss: Pairs has weights, but kind={loss.kind!r} sorts the step, after which a value belongs "
                    "to no pair. Leave weights out, or choose another kind."
                )
            # WPO weighs pairs, it does not train by making them likelier: no gradient through the weight.
            values = values * pairs.weights.detach().double()
        total = total + loss.weight * values
    return PreferenceValues(total, *_rewards(pairs, losses[0]))


@torch.no_grad()
def _rewards(pairs: Pairs, loss: PreferenceLoss) -> tuple[Tensor, Tensor]:
    if pairs.ref_chosen is not None:
        chosen, rejected = pairs.log_ratios(loss.kind)
    elif pairs.chosen_tokens is not None:
        chosen, rejected = pairs.means(loss.kind)
    else:
        chosen, rejected = pairs.chosen.double(), pairs.rejected.double()
    return loss.beta * chosen, loss.beta * rejected


# --------------------------------------------------------------------------------------------------------- scores


def _scores(pairs: Pairs, loss: PreferenceLoss, *, average: bool | None = None) -> Tensor:
    """u, after `divergence` and `average`; [N]."""
    scores = [_score(ratio, loss.divergence, loss.alpha) for ratio in pairs.log_ratios(loss.kind)]
    if loss.average if average is None else average:
        scores = [score / tokens for score, tokens in zip(scores, pairs.lengths(loss.kind), strict=True)]
    return scores[0] - scores[1]


# ---------------------------------------------------------------------------------------------------------- kinds


def _sigmoid(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    return _logistic(loss.beta * _scores(pairs, loss), loss.label_smoothing)


def _robust(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    x, flipped = loss.beta * _scores(pairs, loss), loss.label_smoothing
    # Unbiased for labels that are flipped at this rate (Chowdhury et al. 2024): the expected loss over noisy labels is that
    # of clean ones; so its values may be negative.
    return (flipped * F.logsigmoid(-x) - (1 - flipped) * F.logsigmoid(x)) / (1 - 2 * flipped)


def _hinge(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    return (1 - loss.beta * _scores(pairs, loss)).clamp(min=0)


def _ipo_sum(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    return (_scores(pairs, loss) - 1 / (2 * loss.beta)).square()


def _ipo_mean(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    return (_scores(pairs, loss, average=True) - 1 / (2 * loss.beta)).square()


def _exo(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    x, wrong = loss.beta * _scores(pairs, loss), loss.label_smoothing
    # KL of the policy's preference from the smoothed label, in this direction: infinite for a label without smoothing,
    # which __post_init__ refuses.
    chosen = x.sigmoid() * (F.logsigmoid(x) - math.log1p(-wrong))
    return chosen + (-x).sigmoid() * (F.logsigmoid(-x) - math.log(wrong))


def _nca(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    chosen, rejected = (loss.beta * ratio for ratio in pairs.log_ratios(loss.kind))
    return -F.logsigmoid(chosen) - 0.5 * (F.logsigmoid(-chosen) + F.logsigmoid(-rejected))


def _bco(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    chosen, rejected = (loss.beta * ratio - pairs.reward_shift for ratio in pairs.log_ratios(loss.kind))
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    chosen, rejected = pairs.log_ratios(loss.kind)
    return (chosen - 0.5 / loss.beta).square() + (rejected + 0.5 / loss.beta).square()


def _aot(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    partners = _partners(pairs, loss, 1, "aot_partners")
    margins = pairs.chosen.double() - pairs.rejected.double()
    return _logistic(loss.beta * (margins - partners), loss.label_smoothing)


def _aot_unpaired(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    """The loss of a row: its chosen answer against the partner of it, and its rejected answer against the partner of that.

    A sorted pair joins answers of two rows, which may be on different ranks. So each row has two terms, with the partners as
    constants. Over the step the gradients add up to that of the sum over sorted pairs; each value is counted twice, which
    subtracting a half takes back.
    """
    partners = _partners(pairs, loss, 2, "aot_unpaired_partners")
    chosen, rejected = pairs.log_ratios(loss.kind)
    terms = _logistic(loss.beta * (chosen - partners[:, 0]), loss.label_smoothing)
    terms = terms + _logistic(loss.beta * (partners[:, 1] - rejected), loss.label_smoothing)
    return terms - terms.detach() / 2


def _partners(pairs: Pairs, loss: PreferenceLoss, ndim: int, source: str) -> Tensor:
    partners = pairs.partners
    if partners is None or partners.ndim != ndim or (ndim == 2 and partners.shape[1] != 2):
        given = "none" if partners is None else f"{tuple(partners.shape)}"
        raise DataError(
            f"preference_loss: kind={loss.kind!r} compares sorted values of the whole step. Give Pairs the partners that "
            f"{source} finds in them; it has {given}."
        )
    return partners.detach().double()


def _apo_zero(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    chosen, rejected = pairs.log_ratios(loss.kind)
    return (-loss.beta * chosen).sigmoid() + (loss.beta * rejected).sigmoid()


def _apo_down(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    chosen, rejected = pairs.log_ratios(loss.kind)
    return (loss.beta * chosen).sigmoid() + (-loss.beta * (chosen - rejected)).sigmoid()


def _discopop(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    x = loss.beta * _scores(pairs, loss)
    # exp(-x) overflows where its share sigma(x / tau) vanishes: the product is taken in the exponent.
    exponential = (F.logsigmoid(x / loss.tau) - x).exp()
    return exponential - F.logsigmoid(x) * (-x / loss.tau).sigmoid()


def _orpo(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    chosen, rejected = pairs.means(loss.kind)
    return loss.beta * -F.logsigmoid(_log_odds(chosen) - _log_odds(rejected)) - chosen


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)), with p at most 1 - 1e-8: it is infinite at 1."""
    # Through expm1: 1 - e^x cancels where p is near 1.
    log_p = log_p.clamp(max=-1e-8)
    return log_p - (-torch.expm1(log_p)).log()


def _simpo(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    chosen, rejected = pairs.means(loss.kind)
    return _logistic(loss.beta * (chosen - rejected) - loss.margin, loss.label_smoothing)


def _nll(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    return -pairs.means(loss.kind)[0]


def _sft(pairs: Pairs, loss: PreferenceLoss) -> Tensor:
    if pairs.tokens_per_pair is None:
        raise DataError(
            "preference_loss: kind='sft' is the mean over the chosen tokens of the step. Give Pairs tokens_per_pair, the "
            "mean_of sum_and_count(chosen_tokens) over all of them; or use kind='nll', a mean for each pair."
        )
    return -pairs.chosen.double() / pairs.tokens_per_pair


@dataclass(frozen=True)
class _Kind:
    function: Callable[[Pairs, PreferenceLoss], Tensor]
    options: tuple[str, ...]


_SCORED = ("beta", "divergence", "alpha")
_KINDS = {
    "sigmoid": _Kind(_sigmoid, (*_SCORED, "average", "label_smoothing")),
    "robust": _Kind(_robust, (*_SCORED, "average", "label_smoothing")),
    "hinge": _Kind(_hinge, (*_SCORED, "average")),
    "ipo_sum": _Kind(_ipo_sum, _SCORED),
    "ipo_mean": _Kind(_ipo_mean, _SCORED),
    "exo": _Kind(_exo, (*_SCORED, "average", "label_smoothing")),
    "nca": _Kind(_nca, ("beta",)),
    "bco": _Kind(_bco, ("beta",)),
    "sppo": _Kind(_sppo, ("beta",)),
    "aot": _Kind(_aot, ("beta", "label_smoothing")),
    "aot_unpaired": _Kind(_aot_unpaired, ("beta", "label_smoothing")),
    "apo_zero": _Kind(_apo_zero, ("beta",)),
    "apo_down": _Kind(_apo_down, ("beta",)),
    "discopop": _Kind(_discopop, (*_SCORED, "average", "tau")),
    "orpo": _Kind(_orpo, ("beta",)),
    "simpo": _Kind(_simpo, ("beta", "margin", "label_smoothing")),
    "nll": _Kind(_nll, ()),
    "sft": _Kind(_sft, ()),
}
PREFERENCE_KINDS = tuple(_KINDS)
_WITHOUT_REFERENCE = ("orpo", "simpo", "nll", "sft")


def _near(name: str, known: tuple[str, ...]) -> str:
    near = [choice for choice in known if name in choice] or difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if name and near else ""
    return f"{hint}Choose from {', '.join(known)}."


# Functions of log-ratios of which the losses are made. They and their gradients stay finite.


def _score(log_ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """f'(pi / pi_ref), the reward over beta. Source: Wang et al. 2023 (2309.16240), table 1."""
    if divergence == "forward_kl":
        return 1 - _exp(-log_ratio)
    if divergence == "js":
        return math.log(2) + F.logsigmoid(log_ratio)
    if divergence == "alpha" and abs(alpha - 1) > 1e-6:
        return (_exp((alpha - 1) * log_ratio) - 1) / (alpha - 1)
    return log_ratio


def _logistic(x: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - s) log sigma(x) - s log sigma(-x)."""
    # logsigmoid, not log(sigmoid): it and its gradient are finite for any x.
    losses = -F.logsigmoid(x)
    return losses if not label_smoothing else (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-x)


def _exp(x: Tensor, limit: float = 30.0) -> Tensor:
    """e^x, and its tangent beyond the limit: a gradient must fit into bf16 and fp32 even after squaring."""
    return x.clamp(max=limit).exp() * (1 + (x - limit).clamp(min=0))
