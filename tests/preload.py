"""Imported once by the fork server, so that every rank of every test starts with it."""

import os
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks of tests are many on a machine; those of GPUs are spawned: tests/device

import hypothesis  # noqa: F401  # what test modules import, which each rank would import again
import pytest  # noqa: F401
import torch
import torch._inductor.compile_fx  # what the first torch.compile imports
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.checkpoint
import torch.utils.tensorboard
import transformers.models.llama.modeling_llama  # noqa: F401

import examples.llama_pretrain  # and all that recipes import
import examples.ppo  # noqa: F401
import meshkit  # noqa: F401  # the point is the import

warnings.simplefilter("error")  # a warning on a rank fails the test, as in the test process
torch.set_num_threads(1)
