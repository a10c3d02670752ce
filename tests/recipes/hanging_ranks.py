"""Ranks under torchrun that never end: see tests/test_world.py."""

import torch.distributed as dist

from tests.test_world import hang

dist.init_process_group("gloo")
hang()
