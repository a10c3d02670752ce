"""From a model, or a function that builds a run, to what `resolve` decides, without ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshkit.mesh import MeshSpec
from meshkit.preflight._arguments import coordinate_of
from meshkit.preflight.estimate import Build, Kernels, builder_of, fake_mesh
from meshkit.preflight.explain import default_device
from meshkit.program import read_program
from meshkit.resolve import Resolved, resolve
from meshkit.strategy import Strategy


@contextmanager
def resolved_run(
    model: nn.Module | Build,
    spec: MeshSpec,
    strategy: Strategy | None,
    choices: dict[str, Any],
    *,
    kernels: Kernels,
    verb: str,
) -> Iterator[Resolved]:
    """The resolved strategy that `explain` takes. A function that makes its own run makes it in a fake world.

    verb: for errors.
    """
    if isinstance(model, nn.Module):
        yield resolve(read_program(model), Strategy.of(strategy, choices), spec, device_type=default_device())
        return
    build = builder_of(model, strategy, choices, verb=verb)
    with fake_mesh(spec, coordinate_of(spec, 0), kernels=kernels) as mesh:
        yield build(mesh).resolved
