"""Composable N-D parallel training for plain PyTorch modules."""

import typing as _typing

from meshkit import checkpoint as checkpoint
from meshkit import cluster as cluster
from meshkit import core as core
from meshkit import errors as errors
from meshkit import faults as faults
from meshkit import initialize as initialize
from meshkit import lora as lora
from meshkit import loss as loss
from meshkit import mask as mask
from meshkit import memory as memory
from meshkit import mesh as mesh
from meshkit import models as models
from meshkit import moe as moe
from meshkit import moving as moving
from meshkit import optim as optim
from meshkit import plan as plan
from meshkit import preflight as preflight
from meshkit import step as step
from meshkit import strategy as strategy
from meshkit._parallelize import parallelize as parallelize
from meshkit.checkpoint import Checkpointer as Checkpointer
from meshkit.cluster import Cluster as Cluster
from meshkit.errors import MeshkitError as MeshkitError
from meshkit.faults import run_main as run_main
from meshkit.initialize import init_weights as init_weights
from meshkit.loss import cross_entropy as cross_entropy
from meshkit.mask import Mask as Mask
from meshkit.memory import recompute as recompute
from meshkit.memory.offload import offload_activations as offload_activations
from meshkit.mesh import Mesh as Mesh
from meshkit.mesh import MeshSpec as MeshSpec
from meshkit.mesh import init_mesh as init_mesh
from meshkit.optim import adamw as adamw
from meshkit.optim import muon as muon
from meshkit.optim import lr_schedule as lr_schedule
from meshkit.parallel import context as context
from meshkit.parallel import expert as experts
from meshkit.parallel import pipeline as pipeline
from meshkit.parallel.context import context_parallel as context_parallel
from meshkit.parallel.context import split_batch as split_batch
from meshkit.parallel.data import fully_shard as fully_shard
from meshkit.parallel.expert import expert_parallel as expert_parallel
from meshkit.parallel.pipeline import pipeline_parallel as pipeline_parallel
from meshkit.parallel.pipeline import schedules as schedules
from meshkit.parallel.tensor import tensor_parallel as tensor_parallel
from meshkit.plan import Plan as Plan
from meshkit.preflight.check import check as check
from meshkit.preflight.estimate import estimate as estimate
from meshkit.preflight.explain import explain as explain
from meshkit.preflight.forecast import Batch as Batch
from meshkit.preflight.forecast import forecast as forecast
from meshkit.preflight.placement import place as place
from meshkit.preflight.search import Space as Space
from meshkit.preflight.search import search as search
from meshkit.preflight.observe import observe as observe
from meshkit.step import Run as Run
from meshkit.step import clip_grad_norm as clip_grad_norm
from meshkit.strategy import MemoryPolicy as MemoryPolicy
from meshkit.program import Example as Example
from meshkit.strategy import Strategy as Strategy

if _typing.TYPE_CHECKING:
    from meshkit import data as data
    from meshkit import metrics as metrics
    from meshkit import algos as algos
    from meshkit import recipes as recipes

__all__ = [
    "Batch",
    "Checkpointer",
    "Cluster",
    "Example",
    "Mask",
    "MemoryPolicy",
    "Mesh",
    "MeshSpec",
    "MeshkitError",
    "Plan",
    "Run",
    "Strategy",
    "adamw",
    "algos",
    "check",
    "checkpoint",
    "clip_grad_norm",
    "cluster",
    "context",
    "context_parallel",
    "core",
    "cross_entropy",
    "data",
    "errors",
    "estimate",
    "expert_parallel",
    "experts",
    "explain",
    "faults",
    "forecast",
    "fully_shard",
    "init_mesh",
    "init_weights",
    "initialize",
    "lora",
    "loss",
    "lr_schedule",
    "mask",
    "memory",
    "mesh",
    "metrics",
    "models",
    "moe",
    "observe",
    "offload_activations",
    "optim",
    "parallelize",
    "pipeline",
    "pipeline_parallel",
    "place",
    "plan",
    "preflight",
    "recipes",
    "recompute",
    "run_main",
    "schedules",
    "split_batch",
    "step",
    "strategy",
    "tensor_parallel",
]
_LAZY = (
    "data",
    "metrics",
    "algos",
    "recipes",
)


def __getattr__(name: str) -> _typing.Any:
    """These rooms are loaded when somebody asks for them: `import meshkit` stays light."""
    if name in _LAZY:
        import importlib

        return importlib.import_module(f"meshkit.{name}")
    raise AttributeError(f"module 'meshkit' has no attribute {name!r}")
