"""Mechanism that knows no feature: collectives, shards, random numbers, and the private names of PyTorch."""

from .collectives import reduce_from_axis as reduce_from_axis
from .sharding import full_tensor as full_tensor
