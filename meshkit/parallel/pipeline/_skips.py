"""Stage skipping: which models can leave stages out, or pass them in another order (SkipPipe)."""

from __future__ import annotations

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._flow import Flow
from meshkit.parallel.pipeline._table import Schedule


def why_not_skip(flow: Flow) -> str:
    """What keeps a stage from being given another one's output than it was read to follow; empty where nothing does.

    Nothing does where one hidden state, alike at all cuts, is what stages hand on, and where only modules change it.
    """
    crossing = [flow.crossing(cut) for cut in range(len(flow.cuts))]
    if any(len(refs) != 1 for refs in crossing):
        return f"at its cuts stages hand on {', '.join(str(len(refs)) for refs in crossing)} tensors, and not one each"
    hidden = [ref for (ref,) in crossing]
    if len({(ref.shape, ref.dtype) for ref in hidden}) > 1:
        return f"at its cuts stages hand on {', '.join(str(list(ref.shape)) for ref in hidden)}, which are not alike"
    if not all(ref.dtype.is_floating_point for ref in hidden):
        return f"its stages hand on {hidden[0].dtype}, which is no hidden state"
    if any(ref.storage in flow.between for ref in hidden):
        return "what its stages hand on is changed between modules, which is of no stage that could be left out"
    return ""


def refuse_skips(schedule: Schedule, why: str) -> None:
    """why: see `why_not_skip`. Raises: PlanError for a table that skips stages of a model of which it says something."""
    if schedule.skips and why:
        raise PlanError(
            f"pipeline: the table {schedule.name!r} skips or reorders stages, but of this model none can be left out: {why}. "
            "Use a schedule that passes all stages in order, or other cuts (PipelinePolicy(stages=...))."
        )
