"""The part of the zoo that the suite runs: a model, a column of meshes, and whether it is right there or refused."""

from __future__ import annotations

EQUAL = [
    ("llama", "dp_shard=2"),
    ("llama", "tp=2, sequence"),
    ("qwen3", "pp=2 tp=2"),
    ("mixtral", "tp=2"),
    ("gpt2", "cp=2"),
    ("falcon", "dp_shard=2 tp=2"),
    ("gemma", "tp=2"),
    ("deepseek_v3", "tp=2"),
    ("granite", "pp=2"),
    ("bloom", "pp=2"),
    ("gemma2", "cp=2"),
    ("deepseek_v3", "cp=2"),
    ("gpt_oss", "cp=2"),
    ("llama4_text", "cp=2"),
    ("odd.Plain", "cp=2"),
    ("llama", "dp_shard=2, padded"),
    ("llama", "tp=2, padded"),
    ("llama", "pp=2, padded"),
    ("llama", "cp=2, padded"),
    ("foreign.Bert", "dp_shard=2"),
    ("odd.Plain", "dp_shard=2 tp=2"),
    ("odd.ScaledHead", "pp=2"),
    ("odd.SoftmaxBetween", "tp=2"),
    ("odd.MaskedPositions", "cp=2"),
    ("odd.Scalar", "dp_shard=2"),
    ("odd.ParameterHook", "dp_shard=2"),
    ("odd.ExpertList", "dp_shard=2"),
    ("odd.TorchAttention", "tp=2"),
    ("odd.SpectralNorm", "tp=2"),
]
REFUSED = {
    ("lfm2", "cp=2"): "convolution",
    ("roberta", "cp=2"): "embedding",
    ("opt", "cp=2, padded"): "embedding",
    ("odd.MaskedSum", "cp=2"): "cumsum",
    ("odd.BatchNorm", "dp_shard=2"): "BatchNorm1d",
    ("odd.RunningMean", "dp_shard=2"): "'mean'",
    ("odd.MadeInForward", "dp_shard=2"): "'late' was made in forward",
    ("odd.UnusedAtTimes", "dp_shard=2"): "different modules",
    ("odd.UsesChildWeight", "dp_shard=2"): "outside of the forward",
}
"""With words of the refusal."""
