"""Local updates by their definitions, in one process, in fp64, on a list of replicas: what the outer optimizer must equal.

`Replicas.train` makes inner steps on each; an oracle is a loop over steps around it, with the outer update written out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import meshkit as mk

Values = dict[str, Tensor]
Batch = dict[str, Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Replicas:
    """Models that begin alike, each with an optimizer, and the tokens that each has seen since `forget`."""

    def __init__(self, model: nn.Module, count: int, make: MakeOptimizer) -> None:
        self.models = [copy.deepcopy(model) for _ in range(count)]
        self.optimizers = [make(each) for each in self.models]
        self.tokens = {name: [0.0] * count for name, _ in model.named_parameters()}

    def train(self, batches: list[Batch]) -> None:
        """An inner step of each on its batch."""
        for index, (model, optimizer, batch) in enumerate(zip(self.models, self.optimizers, batches, strict=True)):
            count = int((batch["labels"] != -100).sum())
            rows = batch["labels"].shape[0] or 1  # a rank without rows runs one that counts nothing
            ids = batch["input_ids"] if batch["labels"].shape[0] else torch.zeros(rows, 8, dtype=torch.int64)
            labels = batch["labels"] if batch["labels"].shape[0] else torch.full((rows, 8), -100)
            optimizer.zero_grad()
            (mk.cross_entropy(model(ids), labels) / max(1, count)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for counted in self.tokens.values():
                counted[index] += count

    def mean(self, name: str, of: Callable[[int], Tensor]) -> Tensor:
        """Weighted by the tokens of this parameter's period, which begins anew."""
        counts, self.tokens[name] = self.tokens[name], [0.0] * len(self.models)
        total = sum(counts)
        weights = [count / total if total else 1 / len(counts) for count in counts]
        return sum((weight * of(index) for index, weight in enumerate(weights)), torch.zeros(()).double())

    def value(self, index: int, name: str) -> Tensor:
        return self.models[index].get_parameter(name).data

    def set(self, name: str, value: Callable[[int], Tensor]) -> None:
        for index, model in enumerate(self.models):
            model.get_parameter(name).data.copy_(value(index))


def local_sgd(replicas: Replicas, data: list[list[Batch]], meets: Callable[[int], bool]) -> None:
    names = [name for name, _ in replicas.models[0].named_parameters()]
    for step, batches in enumerate(data, 1):
        replicas.train(batches)
        if meets(step):
            for name in names:
                mean = replicas.mean(name, lambda index, name=name: replicas.value(index, name))
                replicas.set(name, lambda index, mean=mean: mean)


def diloco(
    replicas: Replicas,
    data: list[list[Batch]],
    *,
    every: int,
    lr: float,
    momentum: float,
    fragments: Callable[[str], int] = lambda name: 0,
    parts: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
    exchange: Callable[[str, Callable[[int], Tensor]], Tensor] | None = None,
) -> Values:
    """Returns the outer parameters. exchange: (name, change of a replica) -> mean, instead of the exact one."""
    names = [name for name, _ in replicas.models[0].named_parameters()]
    outer = {name: replicas.value(0, name).clone() for name in names}
    moments = {name: torch.zeros_like(value) for name, value in outer.items()}
    coming: list[tuple[int, str, Tensor]] = []
    for step, batches in enumerate(data, 1):
        replicas.train(batches)

        def land(step: int = step) -> None:
            for _, name, mean in [each for each in coming if each[0] == step]:
                coming.remove(next(each for each in coming if each[1] == name))
                moments[name] = momentum * moments[name] + mean
                outer[name] = outer[name] - lr * (mean + momentum * moments[name])
                replicas.set(
                    name, lambda index, name=name: mixing * replicas.value(index, name) + (1 - mixing) * outer[name]
                )

        land()
        if step % (every // parts) == 0:
            for name in names:
                if fragments(name) == (step // (every // parts) - 1) % parts:

                    def change(index: int, name: str = name) -> Tensor:
                        return outer[name] - replicas.value(index, name)

                    mean = (exchange or replicas.mean)(name, change)
                    coming.append((step + delay, name, mean))
        if not delay:
            land()
    return outer


def co2(
    replicas: Replicas,
    data: list[list[Batch]],
    *,
    every: int,
    lr: float,
    momentum: float,
    clip: float,
    penalty: float | None,
) -> Values:
    """penalty: None is the gap. Returns the outer parameters."""
    names = [name for name, _ in replicas.models[0].named_parameters()]
    outer = {name: replicas.value(0, name).clone() for name in names}
    moments = {name: torch.zeros_like(value) for name, value in outer.items()}
    coming: Values = {}
    for step, batches in enumerate(data, 1):
        replicas.train(batches)
        if step % every:
            continue
        for name in names:
            begun = outer[name]
            sent = replicas.mean(name, lambda index, name=name, begun=begun: begun - replicas.value(index, name))
            if name in coming:
                change = coming[name]
                gap = lr * moments[name].abs() / change.abs() + 1 if penalty is None else penalty
                moments[name] = (momentum * moments[name] + change / gap).clamp(-clip, clip)
                outer[name] = begun - lr * moments[name]
            replicas.set(name, lambda index, name=name: outer[name])
            coming[name] = sent
    return outer


def come_and_go(
    model: nn.Module,
    data: list[list[Batch]],
    make: MakeOptimizer,
    *,
    every: int,
    lr: float,
    momentum: float,
    meetings: list[set[int]],
    comes: dict[int, list[int]],
) -> tuple[Values, Values]:
    """DiLoCo with other replicas at each meeting. meetings: the slots of each. comes: meeting -> slots that get the state of
    its first slot after it. Returns outer parameters and momentum."""
    names = [name for name, _ in model.named_parameters()]
    replicas = {slot: Replicas(model, 1, make) for slot in meetings[0]}
    outer = {name: param.detach().clone() for name, param in model.named_parameters()}
    moments = {name: torch.zeros_like(value) for name, value in outer.items()}
    for number, slots in enumerate(meetings):
        for batches in data[number * every : (number + 1) * every]:
            for slot in slots:
                replicas[slot].train([batches[slot]])
        tokens = {slot: replicas[slot].tokens[names[0]][0] for slot in slots}
        for name in names:
            changes = [(outer[name] - replicas[slot].value(0, name)) * tokens[slot] for slot in sorted(slots)]
            mean = sum(changes, torch.zeros(()).double()) / sum(tokens.values())
            moments[name] = momentum * moments[name] + mean
            outer[name] = outer[name] - lr * (mean + momentum * moments[name])
        for slot in slots:
            for name in names:
                replicas[slot].set(name, lambda _, name=name: outer[name])
                replicas[slot].tokens[name] = [0.0]
        for slot in comes.get(number, []):
            replicas[slot] = Replicas(replicas[min(slots)].models[0], 1, make)
            state = copy.deepcopy(replicas[min(slots)].optimizers[0].state_dict())  # a load takes tensors as they are
            replicas[slot].optimizers[0].load_state_dict(state)
    return outer, moments
