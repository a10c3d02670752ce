"""Router (MoE gate): top-k experts of each token, their weights, and load balancing (auxiliary losses, bias).

Dims: B batch, T tokens of a row, N = B * T tokens, C hidden_size, E experts, K experts that a token chooses, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshkit.core.noting import being_read
from meshkit.core.to_device import to_device
from meshkit.errors import PlanError
from meshkit.moe.aux_loss import AuxiliaryLosses, balance_loss, report, z_loss
from meshkit.moe.real_tokens import counted
from meshkit.moe.replay import RouterPlace
from meshkit.moe.routing import Routing, count_experts, least_capacity


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a token chooses experts (top-k), and the weights of their outputs.

    score: "softmax" over all experts; "softmax_of_chosen", of the logits of the chosen ones; "sigmoid" of each logit.
    normalise: the weights are divided by their sum. scale: they are multiplied by it. groups, top_groups: experts are chosen
    among those of the top_groups of `groups` equal groups, by the sum of each group's two best scores. bias: a buffer is
    added to the scores for the choice, and not to the weights; see `update_bias`. locality: added to the scores of experts on
    this rank's node, for the choice alone: less traffic between nodes, and a choice that depends on the mesh.
    Raises: PlanError for numbers that do not fit together.
    """

    experts: int
    chosen: int
    score: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    bias: bool = False
    locality: float = 0.0
    losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)

    def __post_init__(self) -> None:
        if self.score not in ("softmax", "softmax_of_chosen", "sigmoid"):
            raise PlanError(
                f"RouterConfig: score={self.score!r} is not known. Use softmax, softmax_of_chosen or sigmoid."
            )
        if not 1 <= self.top_groups <= self.groups or self.experts % self.groups:
            raise PlanError(
                f"RouterConfig: {self.experts} experts are not {self.groups} equal groups of which {self.top_groups} can "
                "be chosen."
            )
        group = self.experts // self.groups
        if self.groups > 1 and group < 2:
            raise PlanError(f"RouterConfig: groups={self.groups} have one expert each, but count their two best.")
        if not 1 <= self.chosen <= group * self.top_groups:
            raise PlanError(
                f"RouterConfig: a token cannot choose {self.chosen} of {group * self.top_groups} experts "
                f"({self.top_groups} of {self.groups} groups of {group})."
            )


class Router(nn.Module):
    """Scores of all experts for every token, in fp32 at least, and the best K of them.

    Reports counts and auxiliary losses to `meshkit.moe.aux_loss.collect`. They are computed whether or not someone
    collects, so that a recomputed forward does what the first one did.
    reduce_counts: where a rank holds a part of the tokens, sums [R, E] counts over the ranks that hold the others; see
    `balance_loss`. real_tokens: says of scores [B, T, E] which tokens are no padding, [T] bool; None is all.
    least_capacity: whether to say the least capacity that each expert needs, see `meshkit.moe.routing.least_capacity`.
    replay: given its own choice [B, T, K], says the experts that are used; see `meshkit.moe.replay`.
    """

    e_score_correction_bias: Tensor | None
    last_counts: Tensor | None

    def __init__(self, hidden_size: int, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden_size).uniform_(-1, 1).mul_(hidden_size**-0.5))
        # Buffers, since they are saved and moved with the model and no optimizer may touch them; None keeps the name
        # out of the state dict of routers without one.
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts) if config.bias else None)
        counts_last_step = config.losses.balance > 0 and config.losses.per == "global"
        self.register_buffer(
            "last_counts", torch.zeros(config.experts, dtype=torch.int64) if counts_last_step else None
        )
        self.reduce_counts: Callable[[Tensor], Tensor] = _of_all_tokens
        self.real_tokens: Callable[[Tensor], Tensor | None] | None = None
        self.replay: Callable[[Tensor], Tensor] | None = None
        self.routing_place: RouterPlace | None = None
        self.least_capacity = False
        self.near: list[bool] | None = None  # which experts are on this rank's node; None is all

    def forward(self, x_BTC: Tensor) -> Routing:
        # bf16 logits would tie or swap experts of nearly equal scores.
        logits_BTE = counted(_logits(x_BTC, self.weight))
        logits_NE = rearrange(logits_BTE, "b t e -> (b t) e")
        scores_NE = logits_NE.sigmoid() if self.config.score == "sigmoid" else logits_NE.softmax(-1)
        ranked_NE = logits_NE if self.config.score == "softmax_of_chosen" else scores_NE
        # The choice has no gradient; the weights of the chosen experts have.
        experts_NK = own_NK = self._choose(ranked_NE.detach())
        if self.replay is not None:
            rows, tokens = logits_BTE.shape[:2]
            experts_NK = self.replay(own_NK.view(rows, tokens, self.config.chosen)).flatten(0, 1)
        weights_NK = ranked_NE.gather(-1, experts_NK)
        if self.config.score == "softmax_of_chosen":
            weights_NK = weights_NK.softmax(-1)
        if self.config.normalise:
            # 1e-20 as in DeepSeek's code: sigmoids of all chosen experts may round to 0.
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        self._report(logits_BTE, scores_NE.view_as(logits_BTE), experts_NK, own_NK)
        least_E = least_capacity(x_BTC.flatten(0, 1), self.weight, experts_NK) if self.least_capacity else None
        return Routing(experts_NK, weights_NK * self.config.scale, least_E)

    def _choose(self, ranked_NE: Tensor) -> Tensor:
        """The best K experts [N, K]. Source: DeepSeek-V3 2024, section 2.1.2; its group limit as transformers has it."""
        if self.config.locality and self.near is not None:
            ranked_NE = ranked_NE + self.config.locality * to_device(
                torch.tensor(self.near, dtype=ranked_NE.dtype), ranked_NE.device
            )
        if self.e_score_correction_bias is not None:
            ranked_NE = ranked_NE + self.e_score_correction_bias
        if self.config.groups > 1:
            groups_NGe = rearrange(ranked_NE, "n (g e) -> n g e", g=self.config.groups)
            # Node-limited routing: the sum of a group's two best scores, biased as the choice is.
            best_NG = groups_NGe.topk(2, dim=-1).values.sum(-1)
            top_groups = best_NG.topk(self.config.top_groups, dim=-1).indices
            closed_NG = torch.ones_like(best_NG, dtype=torch.bool).scatter_(-1, top_groups, False)
            # -inf and not 0: a biased score may be negative, and a closed expert would then win over an open one.
            open_NGe = groups_NGe.masked_fill(rearrange(closed_NG, "n g -> n g 1"), -torch.inf)
            ranked_NE = rearrange(open_NGe, "n g e -> n (g e)")
        return ranked_NE.topk(self.config.chosen, dim=-1).indices

    def _report(self, logits_BTE: Tensor, scores_BTE: Tensor, experts_NK: Tensor, own_NK: Tensor) -> None:
        """experts: that are used, whose counts are the load. own: that this router chose, which the balance loss teaches."""
        if being_read():
            return  # losses are no part of what the model returns
        losses: dict[str, Tensor] = {}
        real_T = None if self.real_tokens is None else self.real_tokens(scores_BTE)
        real_T1 = None if real_T is None else real_T.unsqueeze(-1)
        counts_BE = self._count(experts_NK, scores_BTE, real_T1)
        wanted = self.config.losses
        if wanted.balance:
            probabilities_BTE = scores_BTE
            if self.config.score == "sigmoid":
                # Sigmoids do not add up to 1, and the balance loss is defined on shares: DeepSeek-V3 2024, equation
                # 19.
                probabilities_BTE = scores_BTE / (scores_BTE.sum(-1, keepdim=True) + 1e-20)
            if real_T1 is not None:
                probabilities_BTE = probabilities_BTE * real_T1
            own_BE = counts_BE if own_NK is experts_NK else self._count(own_NK, scores_BTE, real_T1)
            counts_RE, sums_RE = own_BE, probabilities_BTE.sum(1)
            if wanted.per != "sequence":
                counts_RE, sums_RE = counts_RE.sum(0, keepdim=True), sums_RE.sum(0, keepdim=True)
            counts_RE = self.reduce_counts(counts_RE) if self.last_counts is None else self.last_counts.unsqueeze(0)
            losses["balance"] = wanted.balance * balance_loss(counts_RE, sums_RE)
        if wanted.z:
            losses["z"] = wanted.z * z_loss(logits_BTE, real_T1)
        report(self, counts_BE.sum(0), losses)

    def _count(self, experts_NK: Tensor, scores_BTE: Tensor, real_T1: Tensor | None) -> Tensor:
        """[B, E]: tokens of each expert."""
        rows, tokens, experts = scores_BTE.shape
        experts_BTK = experts_NK.view(rows, tokens, self.config.chosen)
        if real_T1 is not None:
            experts_BTK = experts_BTK.masked_fill(~real_T1, experts)  # which is no expert
        return count_experts(rearrange(experts_BTK, "b t k -> b (t k)"), experts)


def _logits(x_BTC: Tensor, weight_EC: Tensor) -> Tensor:
    """x weight' in fp32 at least."""
    wide = torch.promote_types(x_BTC.dtype, torch.float32)
    if x_BTC.dtype == wide or being_read():
        return F.linear(x_BTC.to(wide), weight_EC.to(wide))
    logits: Tensor = _WideProduct.apply(x_BTC, weight_EC)
    return logits


class _WideProduct(torch.autograd.Function):
    """The product of a 16-bit x with fp32 results, bit for bit as in fp32, of which backward keeps x as it is.

    F.linear(x.float(), ...) would keep an fp32 copy of x in each layer, twice the bytes of x, which others keep anyway.
    """

    # [Note: fp32 from 16 bits]
    # Products of two 16-bit factors are exact in fp32, so that on CUDA tensor cores that add up in fp32 do what fp32 does. In
    # backward the gradient of the logits is fp32, and products are as torch.backends.cuda.matmul.fp32_precision says, which
    # recipes set by --fp32-precision.

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda and weight.dtype == x.dtype:
            flat = rearrange(x, "b t c -> (b t) c")
            return rearrange(torch.mm(flat, weight.t(), out_dtype=torch.float32), "(b t) e -> b t e", b=len(x))
        return F.linear(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx = (grad @ weight.float()).to(x.dtype)
        dweight = rearrange(grad, "b t e -> e (b t)") @ rearrange(x.float(), "b t c -> (b t) c")
        return dx, dweight.to(weight.dtype)


def _of_all_tokens(counts_RE: Tensor) -> Tensor:
    return counts_RE
