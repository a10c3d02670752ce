"""Imported once by the fork server, so that every rank of every test starts with it."""

import logging
import warnings

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.checkpoint

import meshkit  # noqa: F401  # the point is the import

warnings.simplefilter("error")  # a warning on a rank fails the test, as in the test process
# full_tensor of FSDP over TP says that it gathers in two steps; comparing is all the tests use it for.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
torch.set_num_threads(1)
