"""Learning-rate schedules: a pure function of the step, and the torch scheduler that applies it."""

from __future__ import annotations

import difflib
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from meshkit.errors import MeshkitError

LR_SCHEDULES = ("constant", "linear", "cosine", "wsd")


def lr_factor(
    step: int,
    *,
    kind: str,
    warmup_steps: int,
    total_steps: int,
    min_factor: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """The learning rate of a step as a fraction of the peak. step: optimizer steps already taken, so 0 for the first.

    Warm-up rises linearly, (step + 1) / warmup_steps: the first step already learns, and step warmup_steps - 1 has the
    peak. Then, up to total_steps, where the decaying kinds reach min_factor and stay:

    | kind     | after warm-up                                                  |
    |----------|----------------------------------------------------------------|
    | constant | the peak; min_factor has no effect                             |
    | linear   | a line to min_factor                                           |
    | cosine   | half a cosine to min_factor (Loshchilov and Hutter 2017)       |
    | wsd      | the peak, then a line to min_factor over the last decay_steps, |
    |          | a tenth of total_steps unless given                            |

    Raises: MeshkitError for an unknown kind and for steps or factors that do not fit together.
    Source: wsd is warmup-stable-decay, Hu et al. 2024 (MiniCPM), section 4.
    """
    _refuse(step, kind, warmup_steps, total_steps, min_factor, decay_steps)
    if step < warmup_steps:
        # + 1, since a first step at a rate of 0 would move nothing and still count in Adam's moments.
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    if step >= total_steps:
        return min_factor
    after_warmup = total_steps - warmup_steps
    decay = after_warmup
    if kind == "wsd":
        decay = min(math.ceil(total_steps / 10), after_warmup) if decay_steps is None else decay_steps
    left = total_steps - step
    remaining = 1.0 if left >= decay else left / decay
    if kind == "cosine":
        remaining = (1 - math.cos(math.pi * remaining)) / 2
    return min_factor + (1 - min_factor) * remaining


def _refuse(
    step: int, kind: str, warmup_steps: int, total_steps: int, min_factor: float, decay_steps: int | None
) -> None:
    if kind not in LR_SCHEDULES:
        near = difflib.get_close_matches(kind, LR_SCHEDULES, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise MeshkitError(f"There is no learning-rate schedule {kind!r}. {hint}Choose from {', '.join(LR_SCHEDULES)}.")
    if decay_steps is not None and kind != "wsd":
        raise MeshkitError(
            f"decay_steps={decay_steps} is for kind='wsd'; kind={kind!r} decays from the end of warm-up. Leave it out."
        )
    if total_steps < 1 or step < 0:
        raise MeshkitError(f"step={step} of total_steps={total_steps}: a run has at least 1 step, the first is step 0.")
    if not 0 <= warmup_steps <= total_steps:
        raise MeshkitError(
            f"warmup_steps={warmup_steps} does not fit into total_steps={total_steps}. Use 0 to {total_steps}."
        )
    if not 0 <= min_factor <= 1:
        raise MeshkitError(f"min_factor={min_factor} is a fraction of the peak learning rate. Use 0 to 1.")
    after_warmup = total_steps - warmup_steps
    if decay_steps is not None and not 0 <= decay_steps <= after_warmup:
        raise MeshkitError(
            f"decay_steps={decay_steps} with warmup_steps={warmup_steps} does not fit into total_steps={total_steps}. "
            f"Use 0 to {after_warmup}."
        )


def lr_schedule(
    optimizer: Optimizer,
    *,
    kind: str,
    warmup_steps: int,
    total_steps: int,
    min_factor: float = 0.0,
    decay_steps: int | None = None,
) -> LambdaLR:
    """Multiply every group's learning rate by `lr_factor`; call `.step()` after each optimizer step.

    Its state_dict holds numbers only. To continue a run, build the optimizer and the schedule as before, then load both
    states, in either order: every later learning rate is bit for bit what it would have been. The kind and the lengths
    are not part of the state but of the call, so a run may be continued with more steps.
    Raises: MeshkitError as `lr_factor`.
    """

    # A plain function: LambdaLR would put the attributes of any other callable into its state_dict.
    def factor(step: int) -> float:
        return lr_factor(
            step,
            kind=kind,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            min_factor=min_factor,
            decay_steps=decay_steps,
        )

    return LambdaLR(optimizer, factor)
