"""A plan as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshkit.algos.reallocate._plan import ReallocationPlan

WIDEST_TABLE = 16  # ranks
LINKS_SHOWN = 8


def draw(plan: ReallocationPlan) -> str:
    """Bytes beside the lower bound, then who sends how much to whom: all of it for few ranks, the busiest links for many."""
    moved, bound = plan.bytes_moved, plan.lower_bound_bytes
    ratio = f"{moved / bound:.2f}x" if bound else "nothing"
    lines = [
        f"moves {size(moved)} in {plan.messages} messages and {len(plan.rounds)} rounds of at most {size(plan.bucket_bytes)} "
        "a rank",
        f"lower bound {size(bound)} ({ratio}); {size(plan.bytes_local)} are where they are needed, and only copied",
        f"within nodes {size(moved - plan.bytes_between_nodes)}, between nodes {size(plan.bytes_between_nodes)} "
        f"({plan.ranks_per_node} ranks per node)",
    ]
    senders, receivers = sorted({a for a, _ in plan.links}), sorted({b for _, b in plan.links})
    if not plan.links:
        return "\n".join(lines)
    most_sent = max((sum(plan.links[a, b] for b in receivers), a) for a in senders)
    most_received = max((sum(plan.links[a, b] for a in senders), b) for b in receivers)
    lines.append(
        f"busiest: rank {most_sent[1]} sends {size(most_sent[0])}, rank {most_received[1]} receives {size(most_received[0])}"
    )
    if max(len(senders), len(receivers)) > WIDEST_TABLE:
        busy = plan.links.most_common(LINKS_SHOWN)
        lines += [f"{a:>5} -> {b:<5} {size(moved)}" for (a, b), moved in busy]
        return "\n".join([*lines, f"... {len(plan.links)} links"])
    lines.append("from \\ to" + "".join(f"{rank:>11}" for rank in receivers))
    for sender in senders:
        cells = [plan.links[sender, receiver] for receiver in receivers]
        lines.append(f"{sender:>9}" + "".join(f"{size(cell) if cell else '.':>11}" for cell in cells))
    return "\n".join(lines)


def size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
