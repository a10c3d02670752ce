"""A decoder that gives a score to each token instead of logits; that of an answer's last token is the answer's."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from meshkit.mask import Mask
from meshkit.models.layers import SplitAttention
from meshkit.models.llama import Llama, LlamaConfig
from meshkit.models.llama_plan import LLAMA_PLAN
from meshkit.plan import head


class RewardModel(Llama):
    """`Llama` with `score` [C -> 1] for a head; transformers' LlamaForSequenceClassification with one label."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(replace(config, tie_word_embeddings=False))
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
        return super().forward(input).sum(-1)  # a view would be less, but FSDP warns of those


REWARD_PLAN = replace(
    LLAMA_PLAN,
    tensor={
        **{name: style for name, style in LLAMA_PLAN.tensor.items() if name != "lm_head"},
        "score": head(),
    },
    units=("embed_tokens", "score"),
)
