"""The policy in a checkpoint of local updates: under which others what was saved still means the same, and goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from meshkit.errors import CheckpointError
from meshkit.optim.outer._policy import CO2, Policy

FREE = {"LocalSGD": (), "DiLoCo": ("lr", "momentum", "mixing"), "CO2": ("lr", "momentum", "clip")}
"""What may be another after a load: it is read at an update, and nothing that is saved depends on it."""


def policy_text(policy: Policy) -> str:
    return json.dumps({"policy": type(policy).__name__, **asdict(policy)})


def refuse_other_policy(saved: Iterable[Mapping[str, Any]], policy: Policy, *, prefix: str) -> None:
    """saved: what a checkpoint has of each parameter beside tensors; without anything of an outer optimizer, any policy fits.

    Raises: CheckpointError for the state of a policy that this one cannot go on from.
    """
    for values in saved:
        if f"{prefix}steps" in values:
            _refuse(json.loads(values.get(f"{prefix}policy", '{"policy": "a policy that it does not name"}')), policy)
            return  # it is the same for each


def _refuse(saved: dict[str, Any], policy: Policy) -> None:
    ours = json.loads(policy_text(policy))
    name = ours["policy"]
    gap = isinstance(policy, CO2) and policy.penalty == "gap"  # it reads the rate of the update before
    free = [each for each in FREE[name] if not (gap and each == "lr")]
    if saved["policy"] != name:
        was, now = str(saved["policy"]), name
    else:
        differ = [field for field in ours if field not in free and saved.get(field) != ours[field]]
        if not differ:
            return
        was, now = (f"{name}({', '.join(f'{key}={each.get(key)!r}' for key in differ)})" for each in (saved, ours))
    may = f" Of {name} {', '.join(free)} may be changed." if free else ""
    raise CheckpointError(
        f"the outer optimizer was saved under {was}, and this run has {now}: its period, and what is in flight, would mean "
        f"something else. Give what was saved, or begin anew from its parameters with optimizer=None.{may}"
    )
