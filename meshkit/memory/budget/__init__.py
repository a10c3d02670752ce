"""Memory budget: automatic activation checkpointing, the cheapest treatment of each block within a number of bytes."""
