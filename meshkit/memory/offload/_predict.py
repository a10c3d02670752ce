"""What offload leaves on the device, by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.memory.offload._offload import BLOCKS_LEAVING
from meshkit.memory.policy import ActivationOffload


def bytes_on_device(moved_bytes: Sequence[int], policy: ActivationOffload) -> int:
    """The most that is on the device, of what the blocks of one forward save and offload would move.

    moved_bytes: of each block in order, each storage once: what it saves without its parameters and buffers, inputs that
    need no gradient, and storages below `min_bytes`; with recompute, what that leaves. What is left out here stays on the
    device whatever the policy, in all blocks.
    Forward: the last `keep_last` blocks, and before them at most two that leave, if copies are as slow as can be (on a CPU
    they are done at once: one). Backward: a block and the `ahead` before it, beside those of the last that are not done.
    """
    count = len(moved_bytes)
    first_kept = max(0, count - policy.keep_last)
    kept = list(moved_bytes[first_kept:])
    moved = list(moved_bytes[:first_kept])
    forward = max(
        (sum(moved[max(0, block + 1 - BLOCKS_LEAVING) : block + 1]) for block in range(first_kept)), default=0
    )
    end_of_forward = sum(kept) + sum(moved[max(0, first_kept - BLOCKS_LEAVING) :])
    backward = max((sum(moved[max(0, block - policy.ahead) : block + 1]) for block in range(first_kept)), default=0)
    return max(forward, end_of_forward, backward)
