"""What a period of local updates sends on dp_replicate, and holds while it travels: from sizes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from meshkit.optim.outer._exchange import Layout
from meshkit.optim.outer._policy import Policy, delay_of, fragments_of, period_at, wire_of


@dataclass(frozen=True, kw_only=True)
class PeriodTraffic:
    """Of one rank. layouts: of each fragment of which it has something."""

    policy: Policy
    replicas: int
    layouts: tuple[Layout, ...]
    steps: int
    """of a period; under a rule, of the shortest, and of post-local SGD after its start"""

    @property
    def meetings(self) -> int:
        """All-reduces of a few numbers over the replica's mesh, one for each fragment."""
        return fragments_of(self.policy)

    @property
    def messages(self) -> tuple[tuple[str, int], ...]:
        """(collective, bytes): what leaves the rank for an all-to-all, the result of an all-gather."""
        return tuple(
            message
            for layout in self.layouts
            for message in (("all_to_all", layout.all_to_all_bytes), ("all_gather", layout.all_gather_bytes))
        )

    @property
    def sent_bytes(self) -> int:
        """That leave the rank in a period: to each other replica its chunk, and the mean of this rank's own."""
        others = self.replicas - 1
        return sum(layout.all_to_all_bytes + others * layout.chunk_bytes for layout in self.layouts)

    @property
    def synchronous_bytes(self) -> int:
        """That would leave the rank in a ring all-reduce of its gradients after each step of a period, in the same dtype."""
        sizes = sum(sum(layout.sizes) * layout.dtype.itemsize for layout in self.layouts)
        return 2 * (self.replicas - 1) * sizes * self.steps // self.replicas

    @property
    def flight_bytes(self) -> int:
        """Held by what travels during steps: with a delay, the message and what comes, of the largest fragment."""
        return max((layout.flight_bytes for layout in self.layouts), default=0) if delay_of(self.policy) else 0

    def __str__(self) -> str:
        lines = [f"dp_replicate={self.replicas}: {self.policy}; a period of {self.steps} steps sends"]
        for op in ("all_to_all", "all_gather"):
            sizes = [size for each, size in self.messages if each == op]
            lines.append(f"  {op}: {len(sizes)} calls, {sum(sizes):,} bytes")
        share = self.synchronous_bytes / self.sent_bytes if self.sent_bytes else 0
        lines.append(
            f"  {self.sent_bytes:,} bytes leave this rank, {self.sent_bytes / self.steps:,.0f} a step on average; gradients "
            f"summed in each step would be {share:.1f}x"
        )
        return "\n".join(lines)


def period_traffic(
    policy: Policy,
    sizes: Mapping[str, int],
    fragments: Mapping[str, int],
    *,
    buffers: Sequence[int],
    replicas: int,
    dtype: torch.dtype,
) -> PeriodTraffic:
    """sizes: elements of this rank's shard of each parameter that is averaged. buffers: of the buffers, which meet with the
    last fragment, whole. dtype: of outer parameters."""
    layouts = []
    for fragment in range(count := fragments_of(policy)):
        own = [size for name, size in sizes.items() if fragments[name] == fragment]
        whole = buffers if fragment == count - 1 else ()
        if sum(own) + sum(whole):
            layouts.append(Layout((*own, *whole), replicas, wire_of(policy), dtype, len(whole)))
    start = getattr(policy, "start_step", 0)
    steps = period_at(policy, start, lr=float("inf"))
    return PeriodTraffic(policy=policy, replicas=replicas, layouts=tuple(layouts), steps=steps)
