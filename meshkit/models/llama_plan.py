"""What happens to each part of `Llama` on each axis."""

from meshkit.plan import Plan, attention, column, enter, per_head, row, sequence, vocab

LLAMA_PLAN = Plan(
    tensor={
        "embed_tokens": vocab(),
        "layers.*.input_layernorm": sequence(),
        "layers.*.self_attn": attention(),
        "layers.*.self_attn.{q,k,v}_proj": column(),
        "layers.*.self_attn.{q,k}_norm": per_head(optional=True),  # Qwen3
        "layers.*.self_attn.o_proj": row(),
        "layers.*.post_attention_layernorm": sequence(),
        "layers.*.mlp": enter(),
        "layers.*.mlp.{gate,up}_proj": column(),
        "layers.*.mlp.down_proj": row(),
        "norm": sequence(),
        "lm_head": vocab(),
    },
    blocks=("layers.*",),
    units=("embed_tokens", "lm_head"),
    mlps=("layers.*.mlp",),
)
