"""Imported once by the fork server, so that every rank of every test starts with it."""

import warnings

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.checkpoint

import meshkit  # noqa: F401  # the point is the import

warnings.simplefilter("error")  # a warning on a rank fails the test, as in the test process
torch.set_num_threads(1)
