"""Silent data corruption (SDC): flipped bits of weights and optimizer state, found by sums, named by rank and tensor."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from meshkit.core._torch import tree_leaves
from meshkit.core.hashing import hash64, signed64
from meshkit.core.model_state import copies_of, model_tensors
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.errors import CorruptionError, MeshkitError
from meshkit.mesh.ranges import ranges_in_words
from meshkit.step import Run

SHOWN = 4  # tensors that an error names
MAJORITY = 3  # copies, of which two say which one is wrong

# [Note: two ways to see a flipped bit]
# Copies: ranks that hold the same region of a tensor hold the same bits. Each multiplies its sum by a number of its own,
# drawn so that those of all copies add up to zero: one number, summed over the mesh, says whether any copy differs.
# At rest: between two steps nothing writes weights and moments, so the sum of before is that of after, also of a tensor that
# only one rank holds. It names the rank; of two copies that differ, nothing else could say which is wrong. Tensors of three
# copies and more are left to their majority.
# A sum of words changes with each single bit, by a power of two; two flips hide each other only at the same place of a word,
# in opposite directions.

# [Note: what may be written]
# A tensor counts as at rest if it is the same object at the same address with the same counter of in-place writes. Writes
# through `.data` do not count: who makes them between two steps, as a load does, calls `forget`.


class Key(NamedTuple):
    """state: of the optimizer, "" for the parameter itself. region: of the full tensor, (start, stop) by dim."""

    parameter: str
    state: str
    region: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return f"{self.state} of {self.parameter}" if self.state else self.parameter


class _Rest(NamedTuple):
    """Tensors after an optimizer step. stamps: of [Note: what may be written]. digests: int64 [tensors]."""

    stamps: dict[Key, tuple[int, ...]]
    digests: Tensor


@dataclass(frozen=True)
class _Table:
    """keys: of this rank's tensors. coefficients: int64 [tensors], zero without copies; copies: of each, also this one."""

    keys: list[Key]
    coefficients: Tensor
    copies: list[int]


class CorruptionGuard:
    """Compares weights and optimizer state with their copies every few steps, and with themselves between all steps.

        with CorruptionGuard(run, optimizer, every_steps=10) as guard:
            ...
            optimizer.step()
            guard.check(step)

    What is found: a bit that flips in a weight, also a frozen one, or in a moment between two steps of the optimizer, on any
    mesh, in the next check; and whatever else makes copies differ, as an update that one rank computes wrongly, or a
    gradient that changes after it was reduced. Not found: a gradient that is wrong before the ranks add it up, or after that
    on a mesh without copies. Copies are ranks along dp_replicate; along tp, cp and ep for tensors that these leave whole;
    tied weights on pp.
    every_steps: how often copies are compared, and all ranks learn what any of them has found.
    Cost: two reads of what has fewer than three copies in each step, one of the others in each check; the host waits for the
    device in checks alone.
    Wire: an all-reduce of 24 bytes over the mesh in each check; before the first, a gather of 8 bytes for each tensor.
    """

    def __init__(self, run: Run, optimizer: Optimizer, *, every_steps: int = 10) -> None:
        if every_steps < 1:
            raise MeshkitError(f"CorruptionGuard(every_steps={every_steps}): compare every 1 or more steps.")
        if getattr(optimizer, "delayed", False):
            raise MeshkitError(
                f"CorruptionGuard: a delayed {type(optimizer).__name__} updates while the next step runs, so its weights are "
                "never at rest. Give Offload(delayed=False)."
            )
        self._run, self._optimizer, self._every = run, optimizer, every_steps
        model_tensors(run.model)  # brings sharded parameters back into the modules
        copies = copies_of(run.model)
        self._parameters = [
            (param, copies.get(name, name), tuple((each.start, each.stop) for each in local_slices(param)))
            for name, param in run.named_parameters()
        ]
        self._table: _Table | None = None
        self._resting: _Rest | None = None
        self._changed: dict[tuple[Key, ...], Tensor] = {}  # at rest since the last check, bool [tensors]
        self._checked = 0  # the last step that was found right
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """From now on nothing is looked at."""
        for hook in self._hooks:
            hook.remove()
        self.forget()

    def forget(self) -> None:
        """What was written between two steps, as by loading a checkpoint, is no corruption."""
        self._resting = None
        self._changed.clear()

    def check(self, step: int, *, now: bool = False) -> None:
        """In steps that `every_steps` divides, or `now` on every rank: raise if any rank's state is corrupt.

        Every rank calls it, after the optimizer's step.
        Raises: CorruptionError, with one text on every rank, which names tensors and ranks.
        """
        if not now and step % self._every:
            return
        self._compare_with_rest()
        tensors = dict(self._tensors())
        digests = self._digests(local for local, _ in tensors.values())
        if self._run.mesh.spec.world_size > 1:
            unknown = self._table is None or self._table.keys != [*tensors]
            wrong, changed, to_gather = self._sums(digests, unknown=unknown)
            if to_gather:  # on every rank: their tensors are others than those that were compared last
                self._table = self._gather([*tensors])
                wrong, changed, _ = self._sums(digests, unknown=False)
        else:
            wrong, changed = 0, int(self._count_changed())
        if wrong or changed:
            ranks, sentence = self._found([*tensors], digests)
            error = CorruptionError(
                f"step {step}: silent data corruption since step {self._checked}: {sentence} Go on from a checkpoint of step "
                f"{self._checked} or before, and look at the memory and the processors of the ranks that are named."
            )
            error.ranks = ranks
            raise error
        self._changed.clear()
        self._checked = step

    # ------------------------------------------------------------------------------------------------------- the sums

    def _tensors(self) -> Iterator[tuple[Key, tuple[Tensor, tuple[int, ...]]]]:
        """(shard, stamp) of this rank's weights and moments."""
        for param, name, region in self._parameters:
            for state, tensor in [("", param), *self._optimizer.state.get(param, {}).items()]:
                leaves = [leaf for leaf in tree_leaves(tensor) if isinstance(leaf, Tensor)]
                for index, leaf in enumerate(leaves):
                    local = local_tensor(leaf)
                    if local.numel():
                        key = Key(name, f"{state}[{index}]" if len(leaves) > 1 else state, region)
                        yield key, (local, (id(leaf), local.data_ptr(), leaf._version, local._version))

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        copies = {} if self._table is None else dict(zip(self._table.keys, self._table.copies, strict=True))
        resting = {key: each for key, each in self._tensors() if copies.get(key, 1) < MAJORITY}
        stamps = {key: stamp for key, (_, stamp) in resting.items()}
        self._resting = _Rest(stamps, self._digests(local for local, _ in resting.values()))

    def _before_step(self, *_: Any) -> None:
        self._compare_with_rest()
        self._resting = None

    @torch.no_grad()
    def _compare_with_rest(self) -> None:
        if self._resting is None:
            return
        stamps, before = self._resting
        unwritten = {key: local for key, (local, stamp) in self._tensors() if stamps.get(key) == stamp}
        if len(unwritten) < len(stamps):
            before = before[torch.tensor([key in unwritten for key in stamps], device=before.device)]
        changed = self._digests(unwritten.values()) != before
        keys = (*unwritten,)
        self._changed[keys] = changed | self._changed[keys] if keys in self._changed else changed

    def _digests(self, tensors: Iterable[Tensor]) -> Tensor:
        """int64 [tensors]"""
        device = self._run.mesh.device
        sums = [_digest(local).to(device) for local in tensors]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=device)

    # -------------------------------------------------------------------------------------------------- over the mesh

    def _sums(self, digests: Tensor, *, unknown: bool) -> tuple[int, int, int]:
        """Over the mesh: not zero where copies differ, where any rank saw a change at rest, and where one has new tensors."""
        compared = self._table if not unknown else None
        numbers = [
            (_folded(digests) * compared.coefficients).sum() if compared is not None else digests.new_zeros(()),
            self._count_changed(),
            digests.new_full((), int(unknown)),
        ]
        message = torch.stack(numbers)
        dist.all_reduce(message, group=self._run.mesh.group)
        wrong, of_ranks, to_gather = message.tolist()
        return wrong, of_ranks, to_gather

    def _count_changed(self) -> Tensor:
        none = torch.zeros((), dtype=torch.int64, device=self._run.mesh.device)
        return sum((each.sum() for each in self._changed.values()), none)

    def _gather(self, keys: Sequence[Key]) -> _Table:
        """Which ranks hold the same."""
        hashes = [_identity(key) for key in keys]
        holders: dict[int, list[int]] = {each: [] for each in hashes}
        for rank, row in enumerate(self._of_ranks(torch.tensor(hashes)).tolist()):
            for each in row:
                if each in holders:
                    holders[each].append(rank)
        me = self._run.mesh.group.rank()
        coefficients = [_coefficient(each, holders[each], me) for each in hashes]
        return _Table(
            [*keys], torch.tensor(coefficients, device=self._run.mesh.device), [len(holders[each]) for each in hashes]
        )

    def _of_ranks(self, numbers: Tensor) -> Tensor:
        """[ranks, most]: each rank's numbers, followed by zeros."""
        mesh = self._run.mesh
        most = torch.tensor([numbers.numel()], device=mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh.group)
        padded = torch.zeros(int(most), dtype=torch.int64, device=mesh.device)
        padded[: numbers.numel()] = numbers
        out = torch.empty(mesh.group.size() * padded.numel(), dtype=torch.int64, device=mesh.device)
        dist.all_gather_into_tensor(out, padded, group=mesh.group)
        return out.reshape(mesh.group.size(), -1).cpu()

    def _found(self, keys: Sequence[Key], digests: Tensor) -> tuple[tuple[int, ...], str]:
        """(the ranks, what is wrong where), the same on every rank. A collective."""
        changed = {
            key
            for keys, each in self._changed.items()
            for key, is_changed in zip(keys, each.tolist(), strict=True)
            if is_changed
        }
        if self._run.mesh.spec.world_size == 1:
            return (0,), f"{_listed(map(str, changed))} changed while nothing wrote it."
        hashes = [_identity(key) for key in keys]
        of_ranks = [
            self._of_ranks(torch.as_tensor(each)).tolist()
            for each in (hashes, digests, [int(key in changed) for key in keys])
        ]
        names: list[tuple[str, dict[int, str]]] = [("", {})] * self._run.mesh.spec.world_size
        held: dict[int, dict[int, int]] = {}  # tensor: rank: its sum
        at_rest: dict[int, list[int]] = {}
        for rank, row in enumerate(zip(*of_ranks, strict=True)):
            for tensor, digest, moved in zip(*row, strict=True):
                if tensor:
                    held.setdefault(tensor, {})[rank] = digest
                    if moved:
                        at_rest.setdefault(tensor, []).append(rank)
        differing = [tensor for tensor, each in held.items() if len({*each.values()}) > 1]
        wrong = [*(at_rest or differing)]  # what changed at rest makes other tensors differ with the next update
        mine = {each: str(key) for each, key in zip(hashes, keys, strict=True) if each in wrong}
        dist.all_gather_object(names, (socket.gethostname(), mine), group=self._run.mesh.group)
        hosts = [host for host, _ in names]
        named = {tensor: name for _, each in names for tensor, name in each.items()}
        found: dict[str, list[str]] = {}
        ranks: set[int] = set()
        for tensor in wrong:
            blamed, words = _blamed(held[tensor], at_rest.get(tensor, []))
            ranks |= {*blamed}
            on = dict.fromkeys(hosts[rank] for rank in blamed)
            found.setdefault(f"{words} (on {', '.join(on)})", []).append(named[tensor])
        return tuple(sorted(ranks)), " ".join(f"{_listed(each)} {words}." for words, each in found.items())


def _blamed(held: dict[int, int], at_rest: list[int]) -> tuple[list[int], str]:
    """held: sums of the copies by rank. at_rest: ranks on which it changed while nothing wrote it."""
    if at_rest:
        return at_rest, f"changed on {ranges_in_words(at_rest)} while nothing wrote it"
    (usual, often), *_ = Counter(held.values()).most_common()
    others = [rank for rank, digest in held.items() if digest != usual]
    if 2 * often > len(held):
        right = [rank for rank in held if rank not in others]
        return others, f"is another on {ranges_in_words(others)} than on {ranges_in_words(right)}"
    return [*held], f"is not the same on {ranges_in_words([*held])}, which have copies"


def _listed(names: Iterable[str]) -> str:
    first, more = [*names][:SHOWN], len([*names]) - SHOWN
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _digest(local: Tensor) -> Tensor:
    """The sum of its words modulo 2^64, int64 []: the host does not wait for it."""
    flat = local.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    size = flat.element_size()
    if not (flat.numel() * size) % 8 and not (flat.storage_offset() * size) % 8:
        return flat.view(torch.int64).sum()
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).sum(dtype=torch.int64)


def _identity(key: Key) -> int:
    """Of the tensor, int64 on all ranks; not zero."""
    return signed64(hash64(repr(key)) | 1)


def _folded(digests: Tensor) -> Tensor:
    """To 33 bits. A digest times an even number loses its highest bits, and with them a flip of a sign."""
    low = (1 << 32) - 1
    return digests.bitwise_and(low) + (digests >> 32).bitwise_and(low)


def _coefficient(tensor: int, holders: Sequence[int], me: int) -> int:
    """This rank's, of [Note: two ways to see a flipped bit]; modulo 2^64."""
    drawn = [hash64(f"{tensor} {rank}") for rank in holders[:-1]]
    return signed64(drawn[holders.index(me)] if me != holders[-1] else -sum(drawn))
