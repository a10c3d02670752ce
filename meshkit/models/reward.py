"""Reward model (critic): a decoder with a score for each token in place of logits; an answer's is that of its last token."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from meshkit.errors import PlanError
from meshkit.mask import Mask
from meshkit.models.layers import SplitAttention
from meshkit.models.llama import LLAMA_PLAN, Decoder, Llama, LlamaConfig
from meshkit.models.moe import Mixtral, MixtralConfig, Qwen3Moe, Qwen3MoeConfig, moe_plan
from meshkit.plan import Plan, head


class RewardModel(Decoder):
    """The decoder of a config, `Llama`, `Mixtral` or `Qwen3Moe`, with `score` [C -> 1] for a head.

    In transformers it is the family's ...ForSequenceClassification with one label.
    Raises: PlanError for a config of another model.
    """

    def __init__(self, config: LlamaConfig) -> None:
        # The config says what the model is: no head is left that could be tied.
        super().__init__(replace(config, tie_word_embeddings=False), _layers(config))
        del self.lm_head
        self.score = Score(config.hidden_size, 1, bias=False)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Mask | SplitAttention | None = None
    ) -> Tensor:
        """input_ids: [B, T]. Returns scores [B, T]. The others as in `hidden`."""
        scores_BT: Tensor = self.score(self.hidden(input_ids, position_ids, mask))
        return scores_BT


class Score(nn.Linear):
    """[..., C] to one number each: the last thing that happens, so that a stage of a pipeline may end with it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sum(-1)  # not a view, of which FSDP warns


def _with_score(plan: Plan) -> Plan:
    """The plan of a decoder with the score in place of the logits."""
    tensor = {name: style for name, style in plan.tensor.items() if name != "lm_head"}
    return replace(plan, tensor={**tensor, "score": head()}, units=("embed_tokens", "score"))


REWARD_PLAN = _with_score(LLAMA_PLAN)


def reward_plan(config: LlamaConfig) -> Plan:
    """The plan of a `RewardModel`: `REWARD_PLAN`, and for a config with experts its own."""
    if isinstance(config, MixtralConfig | Qwen3MoeConfig):
        return _with_score(moe_plan(config))
    return REWARD_PLAN


def _layers(config: LlamaConfig) -> nn.ModuleList:
    match config:
        case MixtralConfig():
            return Mixtral(config).layers
        case Qwen3MoeConfig():
            return Qwen3Moe(config).layers
        case LlamaConfig():
            return Llama(config).layers
    raise PlanError(
        f"RewardModel: {type(config).__name__} has no reward model here. Use a LlamaConfig, MixtralConfig or Qwen3MoeConfig."
    )
