"""Faults of today in the part of the zoo that the suite runs: cells that are wrong or crash, and why. Mended ones must go."""

from __future__ import annotations

# Cells of the suite, by the model and the mesh's column.
PART = [
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
    ("lfm2", "cp=2"),
    ("llama", "dp_shard=2, padded"),
    ("foreign.Bert", "dp_shard=2"),
    ("odd.Plain", "dp_shard=2 tp=2"),
    ("odd.ScaledHead", "pp=2"),
    ("odd.SoftmaxBetween", "tp=2"),
    ("odd.MaskedPositions", "cp=2"),
    ("odd.MaskedSum", "cp=2"),
    ("odd.Scalar", "dp_shard=2"),
    ("odd.ParameterHook", "dp_shard=2"),
    ("odd.BatchNorm", "dp_shard=2"),
    ("odd.RunningMean", "dp_shard=2"),
    ("odd.MadeInForward", "dp_shard=2"),
    ("odd.UnusedAtTimes", "dp_shard=2"),
    ("odd.UsesChildWeight", "dp_shard=2"),
    ("odd.ExpertList", "dp_shard=2"),
    ("odd.TorchAttention", "tp=2"),
    ("odd.SpectralNorm", "tp=2"),
]
KNOWN = {
    ("gemma", "tp=2"): "the embedding's scale is lost",
    ("deepseek_v3", "tp=2"): "the pattern of a dense layer matches experts of others",
    ("lfm2", "cp=2"): "a short convolution does not know that the sequence is split",
    ("llama", "dp_shard=2, padded"): "the default loss drops attention_mask",
    ("odd.SoftmaxBetween", "tp=2"): "a pair by name, without a look at what lies between",
    ("odd.MaskedSum", "cp=2"): "a sum along the tokens does not know that the sequence is split",
}
