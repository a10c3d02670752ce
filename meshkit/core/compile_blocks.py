"""torch.compile, block by block: equal blocks share a graph, and what communicates between blocks stays outside."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshkit.core import _torch


def compile_blocks(blocks: Mapping[str, nn.Module], *, backend: bool | str, with_breaks: set[str]) -> None:
    """Compile each block in place. backend: True is inductor. with_breaks: blocks whose graph may break, as experts' does,
    who exchange tokens outside of graphs."""
    _torch.allow_recompiles(len(blocks))
    for name, block in blocks.items():
        # fullgraph elsewhere: a break would be a silent loss of speed, and is refused instead.
        block.compile(fullgraph=name not in with_breaks, backend="inductor" if backend is True else str(backend))
