"""Policies of local updates: local SGD and post-local SGD, DiLoCo and Streaming DiLoCo, CO2; when replicas meet, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshkit.errors import PlanError

Wire = Literal["full", "int8", "int4"]
Weights = Literal["tokens", "equal"]


@dataclass(frozen=True, kw_only=True)
class QuadraticRule:
    """The quadratic synchronisation rule: a period of max(base, (alpha / lr)^2) steps, by the learning rate at its start.

    warmup_steps: before this step the period is `base`, since the low learning rates of warm-up would make it long.
    most: the longest period, which a learning rate near 0 would have.
    Source: Gu et al. 2024 (arXiv 2310.14423), whose warm-up has the period of the peak instead.
    """

    alpha: float
    base: int
    warmup_steps: int = 0
    most: int = 10_000

    def __post_init__(self) -> None:
        if not self.alpha > 0 or not 1 <= self.base <= self.most or self.warmup_steps < 0:
            raise PlanError(f"{self}: alpha is positive, and 1 <= base <= most, 0 <= warmup_steps.")

    def period(self, step: int, lr: float) -> int:
        """Of steps, after so many steps, at this learning rate."""
        if step < self.warmup_steps:
            return self.base
        wanted = self.most if lr <= 0 else (self.alpha / lr) ** 2
        return max(self.base, int(min(wanted, self.most)))


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Local SGD: every so many steps parameters become their mean over the replicas; there is no outer state.

    every: the period in steps, or a rule. start_step: post-local SGD: up to this step replicas meet after each one.
    weights: of replicas in the mean, their valid tokens since the last meeting, or all alike.
    Source: Stich 2019; post-local: Lin et al. 2020.
    """

    every: int | QuadraticRule = 8
    start_step: int = 0
    weights: Weights = "tokens"

    def __post_init__(self) -> None:
        _refuse_common(self, self.every, "full", self.weights)
        if self.start_step < 0:
            raise PlanError(f"LocalSGD(start_step={self.start_step}): a number of steps, at least 0.")


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """DiLoCo: the mean change of a period is the gradient of an outer Nesterov SGD; with fragments, Streaming DiLoCo.

    every: the period in steps, or a rule. lr, momentum: of the outer SGD. fragments: parts of the model, by strided blocks,
    that meet in turn, one each every / fragments steps. delay: tau, the steps between the send of a fragment and its update,
    in which it travels; at most every / fragments. mixing: alpha, the share of its own values that a replica keeps at an
    update. wire: how the changes travel: "full", in the dtype of the outer parameters, or in blocks of int8 or int4.
    feedback: what rounding took is added to the next change (error feedback). weights: as of `LocalSGD`.
    Source: Douillard et al. 2023 (arXiv 2311.08105); streaming: Douillard et al. 2025 (arXiv 2501.18512).
    """

    every: int | QuadraticRule = 50
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    wire: Wire = "full"
    feedback: bool = True
    weights: Weights = "tokens"

    def __post_init__(self) -> None:
        _refuse_common(self, self.every, self.wire, self.weights)
        if not self.lr > 0 or not 0 <= self.momentum < 1 or not 0 <= self.mixing < 1:
            raise PlanError(
                f"DiLoCo(lr={self.lr}, momentum={self.momentum}, mixing={self.mixing}): lr is positive, and the others are "
                "from 0 to below 1."
            )
        if self.fragments < 1 or self.delay < 0:
            raise PlanError(f"DiLoCo(fragments={self.fragments}, delay={self.delay}): at least 1, and at least 0.")
        if isinstance(self.every, QuadraticRule):
            if self.fragments > 1 or self.delay:
                raise PlanError(
                    "DiLoCo(every=QuadraticRule(...)) with fragments or a delay: their table needs one period. Give a number."
                )
        elif self.every % self.fragments:
            raise PlanError(
                f"DiLoCo(every={self.every}, fragments={self.fragments}): fragments meet at even distances. Give a multiple "
                f"of {self.fragments}, as {self.every - self.every % self.fragments or self.fragments}."
            )
        elif self.delay > self.every // self.fragments:
            raise PlanError(
                f"DiLoCo(delay={self.delay}): one fragment travels at a time, and the next leaves after "
                f"{self.every // self.fragments} steps. Give at most {self.every // self.fragments}."
            )


@dataclass(frozen=True, kw_only=True)
class CO2:
    """CO2: the mean change of a period travels during the whole next one, and moves the parameters at its end.

    At each meeting, with x what all replicas began the period at, and d the mean change of the period before:
    m = clamp(momentum m + d / penalty, -clip, clip), x = x - lr m, and all replicas go on from x.
    penalty: of staleness: a number, 1 for none; or "gap", by element 1 + |lr m| / |d|: by how much of the change itself the
    parameters have moved since it began to be measured. clip: the most that m may be, by element. wire, feedback, weights: as
    of `DiLoCo`.
    Source: Sun et al. 2024 (arXiv 2401.16265), whose code has a penalty of 1, and a clipping that it drops; "gap" is
    Gap-Aware's (Barkai et al. 2020), in the unit of the change instead of a running mean of steps.
    """

    every: int = 50
    lr: float = 1.0
    momentum: float = 0.2
    clip: float = 1.0
    penalty: float | Literal["gap"] = 1.0
    wire: Wire = "full"
    feedback: bool = True
    weights: Weights = "tokens"

    def __post_init__(self) -> None:
        if isinstance(self.every, QuadraticRule):
            raise PlanError("CO2(every=QuadraticRule(...)): the table of what travels needs one period. Give a number.")
        _refuse_common(self, self.every, self.wire, self.weights)
        if not self.lr > 0 or not 0 <= self.momentum < 1 or not self.clip > 0:
            raise PlanError(
                f"CO2(lr={self.lr}, momentum={self.momentum}, clip={self.clip}): lr and clip are positive, momentum is from "
                "0 to below 1."
            )
        if self.penalty != "gap" and not (isinstance(self.penalty, int | float) and self.penalty >= 1):
            raise PlanError(f"CO2(penalty={self.penalty!r}): give 'gap', or a number of at least 1, which is none.")


Policy = LocalSGD | DiLoCo | CO2


def fragments_of(policy: Policy) -> int:
    return policy.fragments if isinstance(policy, DiLoCo) else 1


def delay_of(policy: Policy) -> int:
    """Steps between send and update."""
    return policy.delay if isinstance(policy, DiLoCo) else policy.every if isinstance(policy, CO2) else 0


def wire_of(policy: Policy) -> Wire:
    return "full" if isinstance(policy, LocalSGD) else policy.wire


def feeds_back(policy: Policy) -> bool:
    return not isinstance(policy, LocalSGD) and policy.feedback and policy.wire != "full"


def period_at(policy: Policy, step: int, lr: float) -> int:
    """The steps from this one to the next meeting. lr: of the inner optimizer, now."""
    if isinstance(policy, LocalSGD) and step < policy.start_step:
        return 1
    return policy.every.period(step, lr) if isinstance(policy.every, QuadraticRule) else policy.every


def _refuse_common(policy: object, every: object, wire: object, weights: object) -> None:
    name = type(policy).__name__
    if not isinstance(every, QuadraticRule) and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise PlanError(f"{name}(every={every!r}): give a number of steps, at least 1, or a QuadraticRule.")
    if wire not in ("full", "int8", "int4"):
        raise PlanError(f"{name}(wire={wire!r}): choose full, int8 or int4.")
    if weights not in ("tokens", "equal"):
        raise PlanError(f"{name}(weights={weights!r}): choose tokens or equal.")
