"""What a rank says of a cell: equal to one device in loss, gradients and two optimizer steps, refused, wrong, or crashed."""

from __future__ import annotations

import json
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import meshkit as mk
from meshkit.core.gradient import gradient_of
from meshkit.core.model_state import copies_of
from tests.compare_shards import difference
from tests.laws.parity.cases import mesh_for, own_rows
from tests.zoo.case import Cell, mean_loss
from tests.zoo.exact import exact

Outcome = Literal["equal", "refused", "wrong", "crash", "hang", "unbuilt"]
TOL_FP64 = 1e-9  # only the order of summation differs; relative to the largest of a tensor
SMALL = 1e-4  # of the largest gradient: what is smaller than this is held against it, not against noise
STEPS, LR = 2, 1e-2
EPS = 1e-5  # AdamW: a gradient that is zero but for noise is divided by this, and must not become a step
OTHERS_S = 1.5  # how long a rank that failed waits for the others to fail too


@dataclass(frozen=True, kw_only=True)
class Said:
    """Of one rank. text: why, in a line. names: parameters held against one device, of `wanted`, which all ranks together
    must have. split: the share of their elements that tp, ep or etp split. stage: how far it came.
    """

    outcome: Outcome
    text: str = ""
    names: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    split: float = 0.0
    stage: str = "parallelize"
    traceback: str = ""


@dataclass(frozen=True)
class Alone:
    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


def judge(cell: Cell, folder: str) -> Said:
    """On every rank; see `reported`."""
    if cell.generate:
        from tests.zoo import generated

        return generated.judge(cell, folder)
    return reported(_trained, cell, folder)


def reported(tried: Callable[[Cell, list[str]], Said], cell: Cell, folder: str) -> Said:
    """What `tried` says, or refuses, or crashes with. It gets a list, for the stages that begin.

    A rank that fails leaves its word in the folder, for then the others may hang.
    Raises: RuntimeError where this rank failed and another did not, which then waits for it.
    """
    with quiet(), exact():
        said = _said(tried, cell)
    if said.outcome in ("equal", "wrong", "unbuilt"):
        return said
    rank, ranks = dist.get_rank(), dist.get_world_size()
    Path(folder, f"{rank}.part").write_text(json.dumps(asdict(said)))
    Path(folder, f"{rank}.part").rename(Path(folder, f"{rank}.json"))
    end = time.monotonic() + OTHERS_S
    while time.monotonic() < end:
        if all(Path(folder, f"{other}.json").exists() for other in range(ranks)):
            return said
        time.sleep(0.02)
    raise RuntimeError(f"rank {rank} alone: {said.text}")


class Unbuilt(Exception):
    """One device cannot do it either."""


def _said(tried: Callable[[Cell, list[str]], Said], cell: Cell) -> Said:
    stages = ["parallelize"]
    try:
        return tried(cell, stages)
    except Unbuilt as error:
        cause = error.__cause__
        return Said(outcome="unbuilt", text=f"one device: {type(cause).__name__}: {one_line(cause or error)}")
    except mk.MeshkitError as error:
        return Said(outcome="refused", text=f"{type(error).__name__}: {one_line(error)}", stage=stages[-1])
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/meshkit/" in f.filename]
        where = f" @ meshkit/{frames[-1].filename.split('/meshkit/')[-1]}:{frames[-1].lineno}" if frames else ""
        text = f"{type(error).__name__}: {one_line(error)[:300]}{where}"
        return Said(outcome="crash", text=text, stage=stages[-1], traceback=traceback.format_exc())


def _trained(cell: Cell, stages: list[str]) -> Said:
    from tests.zoo.all import case_of  # not at the top: the process that asks has no need of every model's code

    try:
        case = case_of(cell)
        expected = _alone(cell.model, cell.padded)
    except Exception as error:
        raise Unbuilt from error
    mesh = mesh_for(cell.mesh)
    example = case.example(case.batch(0)) if case.example is not None else None
    microbatches = 2 if mesh.spec.pp > 1 else None
    run = mk.parallelize(
        case.build(),
        mesh,
        example=example,
        sequence=cell.sequence,
        microbatches=microbatches,
        unproved="replicate" if cell.replicate else "refuse",
    )
    choices = {name: value for name, value in (("loss", case.loss), ("count", case.count)) if value is not None}
    faults: list[tuple[float, str]] = []
    optimizer, names, split = None, tuple[str, ...](), split_share(run)
    for step in range(STEPS):
        stages.append(f"step {step + 1}")
        torch.manual_seed(step)
        loss = float(run.forward_backward(own_rows(case.batch(step), mesh), **choices))
        faults.append(
            (
                apart(loss, expected.losses[step]),
                f"loss of step {step + 1}: {loss:.8g}, not {expected.losses[step]:.8g}",
            )
        )
        if step == 0:
            errors = _gradient_errors(run, expected)
            names = tuple(errors)
            faults += [(error, f"gradient of {name} is {error:.2g} off") for name, error in errors.items()]
            optimizer = mk.adamw(run, lr=LR, eps=EPS)  # after the first forward: parameters may be made there
        if _worst_of_all_ranks(faults) > TOL_FP64:  # later steps would only repeat it; a rank alone may not leave
            break
        optimizer.step()
        optimizer.zero_grad()
    else:
        stated = list(_state_faults(run, expected, {}))
        if max(stated)[0] > TOL_FP64:  # where one device is as far from itself, it is no fault
            stated = list(_state_faults(run, expected, _noise(cell.model, cell.padded)))
        faults += stated
    worst, text = max(faults)
    return Said(
        outcome="equal" if worst <= TOL_FP64 else "wrong",
        text="" if worst <= TOL_FP64 else text,
        names=names,
        wanted=tuple(expected.gradients),
        split=split,
        stage=stages[-1],
    )


def _worst_of_all_ranks(faults: list[tuple[float, str]]) -> float:
    worst = torch.tensor(max(error for error, _ in faults))
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _gradient_errors(run: mk.Run, expected: Alone) -> dict[str, float]:
    """By name on one device: how far this rank's part is off, relative to the largest. inf: one has it, the other has not."""
    copies = copies_of(run.model)
    largest = max((float(grad.abs().max()) for grad in expected.gradients.values() if grad.numel()), default=0.0)
    errors: dict[str, float] = {}
    for name, param in run.named_parameters():
        key = copies.get(name, name)
        wanted, grad = expected.gradients.get(key), gradient_of(param)
        if key not in expected.parameters:
            errors[key] = inf
        elif wanted is None or grad is None:
            present = wanted if grad is None else grad
            nothing = present is None or not bool((local(present) != 0).any())
            errors[key] = 0.0 if nothing else inf
        else:
            scale = max(float(wanted.abs().max()) if wanted.numel() else 0.0, SMALL * largest)
            errors[key] = difference(grad, wanted) / scale if scale else difference(grad, wanted)
    return errors


def _state_faults(run: mk.Run, expected: Alone, noise: Mapping[str, float]) -> Iterator[tuple[float, str]]:
    """Parameters, and those buffers that changed on one device, after the last step. noise: what is taken off, by name."""
    copies = copies_of(run.model)
    for name, param in run.named_parameters():
        key = copies.get(name, name)
        wanted = expected.parameters[key]
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        error = difference(param, wanted) / scale - noise.get(key, 0.0)
        yield error, f"{name} is {error:.2g} off after two optimizer steps"
    for name, buffer in run.model.named_buffers():
        if name in expected.buffers:
            error = difference(buffer, expected.buffers[name])
            yield error, f"buffer {name} is {error:.2g} off after two steps"


def _noise(model: str, padded: bool) -> dict[str, float]:
    """How far one device comes from itself in these steps, by a rounding of its parameters: what Adam makes of noise."""
    one, other = _alone(model, padded), _alone(model, padded, rounded=True)
    return {name: difference(other.parameters[name], param) for name, param in one.parameters.items()}


@lru_cache(maxsize=2)
def _alone(model: str, padded: bool, *, rounded: bool = False) -> Alone:
    """The oracle: a plain loop on one device, with torch's own optimizer. rounded: from parameters that are 1e-15 off."""
    from tests.zoo.all import case_of

    case = case_of(Cell(model=model, mesh="dp_shard=1", padded=padded))
    module = case.build()
    if rounded:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in module.parameters():
                if param.is_floating_point():
                    param.mul_(1 + 1e-15 * torch.randn(param.shape, generator=generator, dtype=param.dtype))
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    optimizer, losses, gradients = None, list[float](), dict[str, Tensor]()
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = mean_loss(case, module, case.batch(step))
        loss.backward()
        losses.append(float(loss.detach()))
        if optimizer is None:
            named = {name: param for name, param in module.named_parameters() if param.requires_grad}
            gradients = {name: param.grad.clone() for name, param in named.items() if param.grad is not None}
            groups = [
                {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in named.values() if p.ndim <= 1], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(
                [group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.95), eps=EPS
            )
        optimizer.step()
        optimizer.zero_grad()
    changed = {
        name: buffer.detach().clone()
        for name, buffer in module.named_buffers()
        if name not in before or buffer.shape != before[name].shape or not torch.equal(buffer, before[name])
    }
    return Alone(losses, gradients, {name: param.detach() for name, param in module.named_parameters()}, changed)


def split_share(run: mk.Run) -> float:
    """Of the elements of this rank's stages, the share that an axis of tp, ep or etp splits."""
    split = total = 0
    for param in run.parameters():
        total += param.numel()
        if isinstance(param, DTensor):
            names = param.device_mesh.mesh_dim_names or ()
            over = zip(names, param.placements, param.device_mesh.shape, strict=True)
            if any(name in ("tp", "ep", "etp") and size > 1 and not p.is_replicate() for name, p, size in over):
                split += param.numel()
    return split / total if total else 0.0


def apart(value: float, wanted: float) -> float:
    error = abs(value - wanted) / max(1e-3, abs(wanted))
    return inf if error != error else error


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()


@contextmanager
def quiet() -> Iterator[None]:
    """Other people's models warn of much, and a warning is an error here."""
    import transformers

    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
