"""Preference pairs as tensors: log-probabilities of chosen and rejected answers, and the losses and rewards of pairs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from meshkit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """N pairs of answers; every tensor is [N], of any dtype. Empty is allowed.

    chosen, rejected: log pi(y|x), the **sum** over the tokens of the whole answer (with cp: summed over cp before), with the
    gradient. ref_chosen, ref_rejected: the same of the reference model, live or stored with the data, as constants.
    chosen_tokens, rejected_tokens: lengths of the answers.
    weights: a constant factor for each pair, such as `wpo_weights`.
    All parts of a step must share these, from sums over all its microbatches and ranks (docs/two_passes.md):
    partners: [N] from `aot_partners`, or [N, 2] from `aot_unpaired_partners`.
    reward_shift: for kind "bco", `RunningMean.mean`; 0 is TRL's bco_pair.
    tokens_per_pair: for kind "sft", the tokens of all chosen answers over the pairs of the step.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    chosen_tokens: Tensor | None = None
    rejected_tokens: Tensor | None = None
    weights: Tensor | None = None
    partners: Tensor | None = None
    reward_shift: float | Tensor = 0.0
    tokens_per_pair: float | Tensor | None = None

    def __post_init__(self) -> None:
        rows = {name: tuple(getattr(self, name).shape) for name in PER_PAIR if getattr(self, name) is not None}
        if self.partners is not None:
            rows["partners"] = tuple(self.partners.shape[:1])
        # A reference of shape [N, T] would broadcast against [N] in silence, and train on nonsense.
        if len(set(rows.values())) > 1 or len(rows["chosen"]) != 1:
            raise DataError(f"Pairs: shapes {rows}. Each is [N], one number for each pair; sum over tokens before.")

    def log_ratios(self, kind: str) -> tuple[Tensor, Tensor]:
        """log pi - log pi_ref of chosen and rejected, fp64."""
        if self.ref_chosen is None or self.ref_rejected is None:
            raise DataError(
                f"preference_loss: kind={kind!r} compares with a reference, but Pairs has none. Give ref_chosen and "
                "ref_rejected, or use a kind without: simpo, orpo."
            )
        # double before the difference: sums of bf16 models agree in all but the last bits.
        chosen = self.chosen.double() - self.ref_chosen.detach().double()
        return chosen, self.rejected.double() - self.ref_rejected.detach().double()

    def lengths(self, kind: str) -> tuple[Tensor, Tensor]:
        """Tokens of chosen and rejected, fp64, at least 1."""
        if self.chosen_tokens is None or self.rejected_tokens is None:
            raise DataError(
                f"preference_loss: kind={kind!r} averages over tokens. Give Pairs chosen_tokens and rejected_tokens."
            )
        # A pair of other microbatches has no tokens here: its mean must be 0, not NaN, which a share of 0 would not remove.
        return self.chosen_tokens.double().clamp(min=1), self.rejected_tokens.double().clamp(min=1)

    def means(self, kind: str) -> tuple[Tensor, Tensor]:
        """Log-probability per token of chosen and rejected, fp64."""
        chosen_tokens, rejected_tokens = self.lengths(kind)
        return self.chosen.double() / chosen_tokens, self.rejected.double() / rejected_tokens


PER_PAIR = tuple(
    field.name for field in fields(Pairs) if field.name not in ("partners", "reward_shift", "tokens_per_pair")
)


@dataclass(frozen=True)
class PreferenceValues:
    """[N] fp64 each. losses: with the gradient; their sum is to be divided by the pairs of the step, over all ranks.

    rewards, without a gradient: beta (log pi - log pi_ref), or beta times the mean log-probability of a token where there is
    no reference. Their means are over pairs as well.
    """

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor

    @property
    def margins(self) -> Tensor:
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """1.0 where the chosen answer has the higher reward; a tie is 0, as in TRL."""
        return (self.chosen_rewards > self.rejected_rewards).double()
