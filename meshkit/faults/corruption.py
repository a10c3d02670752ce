"""Silent data corruption (SDC): flipped bits and wrong numbers, found by sums, named by rank and tensor."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshkit.core._torch import tree_leaves
from meshkit.core.hashing import hash64, signed64
from meshkit.core.model_state import copies_of, model_tensors
from meshkit.core.sharding import local_slices, local_tensor
from meshkit.errors import CorruptionError, MeshkitError
from meshkit.faults.norm_watch import NormWatch, Outlier
from meshkit.faults.replay import Replay
from meshkit.faults.rest import AtRest, Held, Key, stamp
from meshkit.mesh.ranges import ranges_in_words
from meshkit.step import Run

SHOWN = 4  # tensors that an error names
MAJORITY = 3  # copies, of which two say which one is wrong
GRADIENT = "gradient"  # the state of a Key

# [Note: three ways to see a flipped bit]
# Copies: ranks that hold the same region of a tensor hold the same bits. Each multiplies its sum by a number of its own,
# drawn so that those of all copies add up to zero: one number, summed over the mesh, says whether any copy differs.
# At rest: between two steps nothing writes weights and moments, so the sum of before is that of after, also of a tensor that
# only one rank holds. It names the rank; of two copies that differ, nothing else could say which is wrong. Tensors of three
# copies and more are left to their majority. Gradients rest from their reduction to clipping, and from there to the step.
# Replay: what is computed wrongly before ranks add it up differs from no copy, and was never at rest. The same microbatch
# gives the same numbers again, or one of the two runs was wrong.
# A sum of words changes with each single bit, by a power of two; two flips hide each other only at the same place of a word,
# in opposite directions.


@dataclass(frozen=True)
class _Table:
    """keys: of this rank's tensors. coefficients: int64 [tensors], zero without copies; copies: of each, also this one."""

    keys: list[Key]
    coefficients: Tensor
    copies: list[int]


class CorruptionGuard:
    """Compares weights and optimizer state with copies, all that rests with itself, and a microbatch with its second run.

        with CorruptionGuard(run, optimizer, every_steps=10, replay_every=400) as guard:
            ...
            optimizer.step()
            guard.check(step)

    What is found in the next check, on any mesh: a bit that flips in a weight, also a frozen one, or in a moment between two
    steps of the optimizer; or in a gradient between its reduction and the optimizer's step. Where there are copies: whatever
    else makes them differ, as an update that one rank computes wrongly. Copies are ranks along dp_replicate; along tp, cp and
    ep for tensors that these leave whole; tied weights on pp.
    A gradient that is wrong before the ranks add it up is found in steps that are replayed, if it is of the microbatch that
    is drawn, and if the second run does not make the same mistake.
    every_steps: how often copies are compared, and all ranks learn what any of them has found.
    replay_every: every so many calls of forward_backward end with a second run of one of their microbatches, drawn with
    `seed`; what each module gives forward and gets backward, what is sent and what gradients parameters get is compared.
    outlier: in the last check, a rank whose share of the squared gradient norm is far from its median. No error: its rows may
    be odd.
    Cost: in each step two reads of what has fewer than three copies, two of the gradients, and two more where they are
    clipped; one of the others in each check, and of a replay one microbatch; the host waits for the device in checks alone. A
    replay holds a second gradient.
    Wire: an all-reduce of 24 bytes over the mesh in each check, and a gather of 8 bytes a step; before the first, a gather
    of 8 bytes for each tensor; a replay sends what a microbatch sends.
    Raises: MeshkitError for a replay of compiled blocks, with an optimizer on the host, and on devices whose kernels are not
    deterministic.
    """

    def __init__(
        self, run: Run, optimizer: Optimizer, *, every_steps: int = 10, replay_every: int = 0, seed: int = 0
    ) -> None:
        for name, value, least in (("every_steps", every_steps, 1), ("replay_every", replay_every, 0)):
            if value < least:
                raise MeshkitError(f"CorruptionGuard({name}={value}): give {least} or more steps.")
        if getattr(optimizer, "delayed", False):
            raise MeshkitError(
                f"CorruptionGuard: a delayed {type(optimizer).__name__} updates while the next step runs, so its weights are "
                "never at rest. Give Offload(delayed=False)."
            )
        if run.watcher is not None:
            raise MeshkitError("CorruptionGuard: this run has a guard. Close it before another one begins.")
        self._run, self._optimizer, self._every = run, optimizer, every_steps
        model_tensors(run.model)  # brings sharded parameters back into the modules
        copies = copies_of(run.model)
        self._parameters = [
            (param, copies.get(name, name), tuple((each.start, each.stop) for each in local_slices(param)))
            for name, param in run.named_parameters()
        ]
        # By id of what an optimizer holds: it, its shard, where that lies, and the leaves.
        self._known: dict[int, tuple[Any, Any, int, list[tuple[Key, Tensor, Tensor]]]] = {}
        self._table: _Table | None = None
        self._state = AtRest(self._tensors, run.mesh.device)
        self._gradients = AtRest(self._gradients_now, run.mesh.device)
        self._replay = Replay(run, every_steps=replay_every, seed=seed)
        self._norms = NormWatch(run.mesh)
        self._checked = 0  # the last step that was found right
        self.outlier: Outlier | None = None
        run.watcher = _Watcher(self._gradients, self._replay, self._norms)
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
        self._replay.close()
        self._run.watcher = None
        self.forget()

    def forget(self) -> None:
        """What was written between two steps, as by loading a checkpoint, is no corruption."""
        for rest in (self._state, self._gradients):
            rest.forget()
        self._replay.forget()
        self._norms.forget()

    @torch.no_grad()
    def check(self, step: int, *, now: bool = False) -> None:
        """In steps that `every_steps` divides, after a replay, or `now` on every rank: raise if any rank's state is corrupt.

        Every rank calls it, after the optimizer's step. `outlier` is then what was seen of the gradient norms since the last.
        Raises: CorruptionError, with one text on every rank, which names tensors and ranks.
        """
        if not now and step % self._every and not self._replay.has_run:
            return
        if now:  # also what flipped since the step; otherwise the next one sees it
            self._state.look()
        self.outlier = self._norms.gather(step)
        tensors = dict(self._tensors())
        sums = self._state.sums(tensors)
        if self._run.mesh.spec.world_size > 1:
            unknown = self._table is None or self._table.keys != [*tensors]
            wrong, changed, to_gather = self._sums(sums, unknown=unknown)
            if to_gather:  # on every rank: their tensors are others than those that were compared last
                self._table = self._gather([*tensors])
                wrong, changed, _ = self._sums(sums, unknown=False)
        else:
            wrong, changed = 0, int(self._count())
        if wrong or changed:
            ranks, sentence = self._found([*tensors], sums)
            error = CorruptionError(
                f"step {step}: silent data corruption since step {self._checked}: {sentence} Go on from a checkpoint of step "
                f"{self._checked} or before, and look at the memory and the processors of the ranks that are named."
            )
            error.ranks = ranks
            raise error
        for rest in (self._state, self._gradients):
            rest.found_right()
        self._replay.forget()
        self._checked = step

    # ------------------------------------------------------------------------------------------------------- the sums

    def _tensors(self) -> Held:
        """This rank's weights and moments."""
        known, self._known = self._known, {}
        for param, name, region in self._parameters:
            for state, value in [("", param), *self._optimizer.state.get(param, {}).items()]:
                # Taken apart once: half of the time of a look at small tensors went there.
                shard = value.to_local() if isinstance(value, DTensor) else value
                plain = type(shard) in (Tensor, nn.Parameter)  # what is inside of others may change, and they stay
                place = shard.data_ptr() if plain else 0  # `.data` may have got other memory
                before = known.get(id(value))
                if before is None or before[0] is not value or before[1] is not shard or before[2] != place:
                    before = value, shard, place, [*_leaves(name, state, value, region)]
                if plain:
                    self._known[id(value)] = before
                for key, leaf, local in before[3]:
                    yield key, (local, stamp(leaf, local))

    def _gradients_now(self) -> Held:
        """Without those that an optimizer on the host has taken."""
        for param, name, region in self._parameters:
            if param.grad is not None:
                local = local_tensor(param.grad)
                if local.numel():
                    yield Key(name, GRADIENT, region), (local, stamp(param.grad, local))

    def _after_step(self, *_: Any) -> None:
        table = self._table
        copied = {
            key
            for key, count in ([] if table is None else zip(table.keys, table.copies, strict=True))
            if count >= MAJORITY
        }
        self._state.begin(without=copied)

    def _before_step(self, *_: Any) -> None:
        self._gradients.end()
        self._state.end()

    # -------------------------------------------------------------------------------------------------- over the mesh

    def _sums(self, sums: Tensor, *, unknown: bool) -> tuple[int, int, int]:
        """Over the mesh: not zero where copies differ, where any rank saw a change at rest, and where one has new tensors."""
        compared = self._table if not unknown else None
        numbers = [
            (_folded(sums) * compared.coefficients).sum() if compared is not None else sums.new_zeros(()),
            self._count(),
            sums.new_full((), int(unknown)),
        ]
        message = torch.stack(numbers)
        dist.all_reduce(message, group=self._run.mesh.group)
        wrong, of_ranks, to_gather = message.tolist()
        return wrong, of_ranks, to_gather

    def _count(self) -> Tensor:
        """What this rank saw, int64 []."""
        return self._state.count() + self._gradients.count() + self._replay.count()

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

    def _found(self, keys: Sequence[Key], sums: Tensor) -> tuple[tuple[int, ...], str]:
        """(the ranks, what is wrong where), the same on every rank. A collective."""
        changed = self._state.changed() | self._gradients.changed()
        replayed = self._replay.found()
        if self._run.mesh.spec.world_size == 1:
            sentences = [f"{_listed(map(str, changed))} changed while nothing wrote it."] if changed else []
            return self._run.mesh.ranks, " ".join([*sentences, *([replayed[1]] if replayed else [])])
        grads = [key for key in changed if key.state == GRADIENT]
        keys, sums = [*keys, *grads], torch.cat([sums, sums.new_zeros(len(grads))])
        hashes = [_identity(key) for key in keys]
        of_ranks = [
            self._of_ranks(torch.as_tensor(each)).tolist()
            for each in (hashes, sums, [int(key in changed) for key in keys])
        ]
        world = self._run.mesh.ranks
        names: list[tuple[str, dict[int, str]]] = [("", {})] * len(world)
        held: dict[int, dict[int, int]] = {}  # tensor: rank: its sum
        at_rest: dict[int, list[int]] = {}
        for rank, row in zip(world, zip(*of_ranks, strict=True), strict=True):
            for tensor, digest, moved in zip(*row, strict=True):
                if tensor:
                    held.setdefault(tensor, {})[rank] = digest
                    if moved:
                        at_rest.setdefault(tensor, []).append(rank)
        differing = [tensor for tensor, each in held.items() if len({*each.values()}) > 1]
        # What changed at rest, or was computed wrongly, makes other tensors differ with the next update.
        wrong = [*at_rest] if at_rest or replayed else differing
        mine = {each: str(key) for each, key in zip(hashes, keys, strict=True) if each in wrong}
        dist.all_gather_object(names, (socket.gethostname(), mine), group=self._run.mesh.group)
        hosts = {rank: host for rank, (host, _) in zip(world, names, strict=True)}
        named = {tensor: name for _, each in names for tensor, name in each.items()}
        found: dict[str, list[str]] = {}
        ranks = {*(replayed[0] if replayed else [])}
        for tensor in wrong:
            blamed, words = _blamed(held[tensor], at_rest.get(tensor, []))
            ranks |= {*blamed}
            on = dict.fromkeys(hosts[rank] for rank in blamed)
            found.setdefault(f"{words} (on {', '.join(on)})", []).append(named[tensor])
        sentences = [f"{_listed(each)} {words}." for words, each in found.items()]
        return tuple(sorted(ranks)), " ".join([*sentences, *([replayed[1]] if replayed else [])])


def _leaves(
    name: str, state: str, value: Any, region: tuple[tuple[int, int], ...]
) -> Iterator[tuple[Key, Tensor, Tensor]]:
    """(key, tensor, this rank's shard of it) of a parameter, or of a state of the optimizer, which may have several."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    for index, leaf in enumerate(leaves):
        local = local_tensor(leaf)
        if local.numel():
            yield Key(name, f"{state}[{index}]" if len(leaves) > 1 else state, region), leaf, local


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


def _identity(key: Key) -> int:
    """Of the tensor, int64 on all ranks; not zero."""
    return signed64(hash64(repr(key)) | 1)


def _folded(digests: Tensor) -> Tensor:
    """To 33 bits. A digest times an even number loses its highest bits, and with them a flip of a sign."""
    low = (1 << 32) - 1
    return digests.bitwise_and(low) + (digests >> 32).bitwise_and(low)


def _coefficient(tensor: int, holders: Sequence[int], me: int) -> int:
    """This rank's, of [Note: three ways to see a flipped bit]; modulo 2^64."""
    drawn = [hash64(f"{tensor} {rank}") for rank in holders[:-1]]
    return signed64(drawn[holders.index(me)] if me != holders[-1] else -sum(drawn))


class _Watcher:
    """What a run tells of its steps, handed to those who look at it: a `StepWatch`."""

    def __init__(self, gradients: AtRest, replay: Replay, norms: NormWatch) -> None:
        self._gradients, self._replay, self._norms = gradients, replay, norms
        self._second = False

    def begin(self, microbatches: int) -> int | None:
        self._gradients.end()  # of a step before, to which this one adds
        self._norms.begin()
        return self._replay.begin(microbatches)

    def around(self, microbatch: int, place: int) -> AbstractContextManager[None]:
        return self._replay.around(microbatch, place, second=self._second)

    @contextmanager
    def again(self) -> Iterator[None]:
        self._second = True
        try:
            with self._replay.again():
                yield
        finally:
            self._second = False

    def reduced(self) -> None:
        self._replay.end()
        self._gradients.begin()

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._gradients.end()
        yield
        self._gradients.begin()

    def measured(self, squares: Tensor) -> None:
        self._norms.add(squares)
