"""Folders of torch.distributed.checkpoint (DCP) that another program wrote: weights from them, asked for by name."""

from __future__ import annotations

import os
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from meshkit.checkpoint._agree import on_each_rank
from meshkit.checkpoint._dcp import FileReader, Index, read_index, read_into
from meshkit.checkpoint._state import dtype_name, full_model_tensors
from meshkit.core.model_state import model_tensors
from meshkit.errors import CheckpointError
from meshkit.step import Run


def load_dcp(
    run: Run, folder: str | os.PathLike[str], *, prefix: str = "", timeout: timedelta = timedelta(minutes=30)
) -> None:
    """Read parameters and persistent buffers of the model from a folder of DCP, in place, on any mesh. Every rank calls it.

    prefix: what stands before a name there, such as "model.". Values are converted to the parameter's dtype. The folder may
    hold more. Its index is a pickle, of which nothing but DCP's own records is read. It has no digests: damage that the
    format itself does not notice is not noticed, so a run of meshkit is loaded by `Checkpointer`.
    Wire: small values between hosts; the values come from the files.
    Raises: CheckpointError, on every rank the same and before anything is changed, for a folder that has not all names and
    shapes of the model, naming the first.
    """
    run.mesh.agreement.meet("load_dcp", facts={"folder": Path(folder).name, "prefix": prefix})
    with closing(run.mesh.host.apart(timeout)) as ranks:

        def look() -> None:
            model_tensors(run.model)  # first for its side effect: FSDP puts its shards back
            _refuse_other(read_index(Path(folder), pickled=True), full_model_tensors(run.model), Path(folder), prefix)

        on_each_rank(ranks, "load_dcp()", look)
        targets = {f"{prefix}{name}": tensor for name, tensor in model_tensors(run.model).items()}
        with torch.no_grad():
            reader = FileReader(Path(folder), pickled=True)
            read_into(targets, reader, ranks, action=f"reading {folder}, with the run half loaded")
    torch.autograd.graph.increment_version([*targets.values()])  # as `restore` does, and why


def _refuse_other(index: Index, tensors: dict[str, Tensor], folder: Path, prefix: str) -> None:
    for name, tensor in tensors.items():
        key = f"{prefix}{name}"
        if key not in index.tensors:
            some = ", ".join(map(repr, list(index.tensors)[:3]))
            raise CheckpointError(
                f"{folder} has no {key!r}, which the model needs. It has {some}, ...: give prefix= as the names there begin."
            )
        there, dtype = index.tensors[key]
        if there != (shape := tuple(tensor.shape)):
            raise CheckpointError(
                f"{folder}: {key!r} has the shape {there} there and {shape} in the model. Build the model that was saved."
            )
        if dtype.is_floating_point != tensor.is_floating_point():
            raise CheckpointError(
                f"{folder}: {key!r} is {dtype_name(dtype)} there and {dtype_name(tensor.dtype)} in the model, which is no "
                "conversion of weights. Build the model that was saved."
            )
