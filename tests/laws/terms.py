"""The field's terms: who searches one finds it, in the library and in the pages.

A term's spellings are regular expressions without regard to case, of which one must be met. They are ways to write the
same words, not other words for the same thing: "recompute" is no spelling of activation checkpointing.
"""

from __future__ import annotations

TERMS: dict[str, tuple[str, ...]] = {
    # parallelism
    "data parallelism": (r"data[- ]parallel",),
    "tensor parallelism": (r"tensor[- ]parallel",),
    "sequence parallelism": (r"sequence[- ]parallel",),
    "context parallelism": (r"context[- ]parallel",),
    "pipeline parallelism": (r"pipeline[- ]parallel",),
    "expert parallelism": (r"expert[- ]parallel",),
    "ZeRO": (r"\bzero-[123]\b",),
    "FSDP": (r"\bfsdp2?\b",),
    "HSDP": (r"\bhsdp\b",),
    "process group": (r"process[- ]group",),
    "topology": (r"\btopolog(y|ies)\b",),
    "all-to-all": (r"all[- ]to[- ]all",),
    "all-reduce": (r"all-reduce",),
    "ring attention": (r"ring attention",),
    "zigzag": (r"zig-?zag",),
    "Ulysses": (r"\bulysses\b",),
    "1F1B": (r"\b1f1b\b",),
    "pipeline bubble": (r"\bbubble",),
    "microbatch": (r"micro-?batch",),
    "load balancing": (r"load[- ]balanc",),
    # the step
    "training step": (r"training step",),
    "gradient accumulation": (r"gradient accumulation",),
    "gradient clipping": (r"gradient clipping|clip(ping|s)? (of )?(the )?gradients?\b|clip_grad_norm",),
    "learning rate schedule": (r"learning[- ]rate schedule",),
    "mixed precision": (r"mixed[- ]precision",),
    "loss normalisation": (r"loss normali[sz]ation|normali[sz](es?|ed|ing) the loss",),
    "cross-entropy": (r"cross-entropy",),
    # memory
    "activation checkpointing": (r"activation checkpoint",),
    "activation offload": (r"offload(s|ing)? (of )?activations|activation offload",),
    "optimizer state": (r"optimizer states?\b",),
    "master weights": (r"master weights",),
    # data, numbers, failures
    "data loader": (r"\bdata[- ]?loader",),
    "packing": (r"\bpack(ed|ing)\b",),
    "MFU": (r"\bmfu\b",),
    "watchdog": (r"\bwatchdog\b",),
    "heartbeat": (r"\bheart-?beats?\b",),
    "straggler": (r"\bstraggler",),
    # post-training
    "reference model": (r"reference model",),
    "reward model": (r"reward model",),
    "rollout": (r"\broll-?outs?\b",),
    "KV cache": (r"\bkv[- ]cache|key[-/]value cache",),
    "advantage": (r"\badvantages?\b",),
    "GAE": (r"\bgae\b",),
    "weight sync": (r"weight[- ]sync",),
    "token-level or sequence-level loss": (r"token[- ]level|sequence[- ]level",),
}
