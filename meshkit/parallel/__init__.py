"""Who holds what: data parallelism (FSDP, ZeRO), tensor, context, expert and pipeline parallelism, each a block."""
