"""What activation offload moves: the storages that blocks of a thin model send off the device, and those that come back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshkit.core.host_accounting import estimating
from meshkit.memory.offload import Event, Stored, Tier, offload_activations, offload_of, round_up
from meshkit.resolve import Resolved
from meshkit.step import Run
from meshkit.strategy import ActivationOffload


def traced_offload(resolved: Resolved) -> ActivationOffload | None:
    """What of the policy changes which storages move; None where none does.

    Which blocks move is in the treatments; where to, and how far ahead they come back, is walked and priced, not traced.
    """
    policy = resolved.memory.offload
    if policy is None or not any(each.offload for each in resolved.treatments.values()):
        return None
    return ActivationOffload(keep_last=0, ahead=0, min_bytes=policy.min_bytes)


class WatchedTier:
    """A tier of which is known whose storages go through it.

    number_of: of a tensor's storage. out, back: by block, the numbers of those that left in its forward, and of those that
    they came back to. bytes: that left, each storage once; pieces: what these take of the tier.
    """

    def __init__(self, tier: Tier, number_of: Callable[[Tensor], int | None]) -> None:
        self._tier, self._number_of = tier, number_of
        self.waited_s = 0.0
        self.block = ""
        self.out: defaultdict[str, set[int]] = defaultdict(set)
        self.back: defaultdict[str, set[int]] = defaultdict(set)
        self.bytes: defaultdict[str, int] = defaultdict(int)
        self.pieces: defaultdict[str, int] = defaultdict(int)

    def store(self, source: Tensor) -> Stored:
        self._note(self.out, self.block, source)
        self.bytes[self.block] += source.numel()
        self.pieces[self.block] += round_up(source.numel())
        return _WatchedStored(self._tier.store(source), self, self.block)

    def fetched(self, block: str, target: Tensor) -> None:
        self._note(self.back, block, target)

    def tidy(self) -> None:
        self._tier.tidy()

    def end_step(self) -> None:
        self._tier.end_step()

    @property
    def peak_bytes(self) -> int:
        return self._tier.peak_bytes

    def describe(self) -> str:
        return self._tier.describe()

    def _note(self, where: defaultdict[str, set[int]], block: str, tensor: Tensor) -> None:
        if (number := self._number_of(tensor)) is not None:
            where[block].add(number)


class _WatchedStored:
    def __init__(self, stored: Stored, tier: WatchedTier, block: str) -> None:
        self._stored, self._tier, self._block = stored, tier, block

    @property
    def left(self) -> Event:
        return self._stored.left

    def fetch(self, target: Tensor) -> bool:
        self._tier.fetched(self._block, target)
        return self._stored.fetch(target)

    def arrive(self) -> None:
        self._stored.arrive()

    def release(self) -> None:
        self._stored.release()


def watch_offload(
    run: Run, resolved: Resolved, number_of: Callable[[Tensor], int | None] = lambda tensor: None
) -> WatchedTier | None:
    """Offload the blocks of a thin run as those of the whole are; None where none is.

    Copies are over at once, and a block's come back when its backward begins: the plainest there is, of which other ones
    differ in when something is there.
    """
    policy = traced_offload(resolved)
    if policy is None:
        return None
    kept = [name for name in run.blocks if not resolved.treatments[name].offload]
    with estimating(late=False):
        offload_activations(run.model, run.mesh.dense, blocks=run.blocks, policy=policy, keep=kept)
    offload = offload_of(run.model)
    assert offload is not None
    watched = offload.tier = WatchedTier(offload.tier, number_of)

    def begins(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            watched.block = name

        return hook

    for name in run.blocks:
        run.model.get_submodule(name).register_forward_pre_hook(begins(name))
    return watched
