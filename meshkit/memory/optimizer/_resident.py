"""Which share of the optimizer's state stays on the device."""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.errors import PlanError

STATE_BYTES = 12  # of a parameter: fp32 master and two moments; an fp32 parameter is its own master, and that makes 8


def choose_resident(sizes: Sequence[int], share: float) -> list[bool]:
    """Which tensors stay on the device, so that they hold about `share` of all elements; the same on every rank.

    sizes: elements of the whole tensors, in the model's order. Largest first, each that still fits; then the smallest one
    left, if that comes nearer. The share is missed by at most half of the smallest tensor left.
    """
    target = share * sum(sizes)
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    stays = [False] * len(sizes)
    held = 0
    for index in order:
        if held + sizes[index] <= target:
            stays[index], held = True, held + sizes[index]
    left = [index for index in order if not stays[index]]
    if left and held + sizes[left[-1]] - target < target - held:
        stays[left[-1]] = True
    return stays


def resident_share(
    *,
    parameters: int,
    device_bytes: float,
    host_s_per_parameter: float,
    link_bytes_per_s: float,
    hidden_s: float = 0.0,
    state_bytes: int = STATE_BYTES,
    sent_bytes: int = 8,
) -> float:
    """The smallest share of the states to keep on the device so that the host's update costs no time, or what fits.

    parameters: of this rank's shards. device_bytes: free beside everything else. host_s_per_parameter: of the host's AdamW,
    as `benchmarks/optimizer.py` prints it. sent_bytes: gradient down and parameter up.
    hidden_s: what runs beside the update: with delayed=True a step's forward and backward, else 0.
    The slower of host and link sets the pace, since an update and its copy overlap.
    Source: the reading of ZeRO-Offload (Ren et al. 2021, section 4) as T >= parameters × pace, solved for the share.
    """
    if parameters < 1 or device_bytes < 0 or state_bytes < 1:
        raise PlanError(
            f"resident_share(parameters={parameters}, device_bytes={device_bytes}, state_bytes={state_bytes}): give at least "
            "one parameter, one byte of state for it, and no negative room."
        )
    pace_s = max(host_s_per_parameter, sent_bytes / link_bytes_per_s)
    needed = 1 - hidden_s / (parameters * pace_s) if pace_s else 0.0
    fits = device_bytes / (parameters * state_bytes)
    return max(0.0, min(1.0, needed, fits))
