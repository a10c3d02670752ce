"""Mechanism that knows no feature: collectives, shards, random numbers, and the private names of PyTorch."""
