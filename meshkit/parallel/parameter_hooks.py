"""Hooks on parameters (`register_hook`, `register_post_accumulate_grad_hook`) on a mesh: once a step on full gradients."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshkit.core.model_state import copies_of
from meshkit.core.sharding import full_tensor, local_slices, local_tensor
from meshkit.errors import PlanError

Hooks = Mapping[int, Callable[[Any], Any]]

# [Note: hooks on parameters]
# FSDP and tensor parallelism replace parameters, and autograd calls a hook on what a rank computes: the gradient of its own
# rows and its own part. What a hook does with it cannot be known (clip it, zero its first rows, take its norm), so the only
# thing that is right for every hook is what it would get on one device: the whole gradient of the step, as a plain tensor.
# So hooks leave the parameters before they are replaced, and run after the step's last backward on a gathered gradient, of
# which each rank then keeps its part. Once a step, not once a microbatch: a result may not depend on how rows are split.


@dataclass(frozen=True)
class ParameterHooks:
    """Hooks by the name of the parameter. The tables are the parameter's own, so that a handle's `remove` still works.

    gradient: called with the gradient; what they return replaces it. accumulated: called with the parameter.
    """

    gradient: Mapping[str, Hooks]
    accumulated: Mapping[str, Hooks]

    def __bool__(self) -> bool:
        return any(self.gradient.values()) or any(self.accumulated.values())

    def hooked(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters that have hooks, in the same order on every rank that shares them."""
        copies = copies_of(model)
        for local_name, param in model.named_parameters():
            name = copies.get(local_name, local_name)
            if self.gradient.get(name) or self.accumulated.get(name):
                yield name, param


def hooks_of(model: nn.Module) -> ParameterHooks:
    """The user's hooks on parameters."""
    named = dict(model.named_parameters())
    return ParameterHooks(
        {name: param._backward_hooks for name, param in named.items() if param._backward_hooks},
        {name: hooks for name, param in named.items() if (hooks := _accumulated(param))},
    )


def take_hooks(model: nn.Module) -> ParameterHooks:
    """The same, and off the parameters, so that autograd does not call them."""
    hooks = hooks_of(model)
    for name, param in model.named_parameters():
        if name in hooks.gradient:
            param._backward_hooks = None
        if name in hooks.accumulated:
            # An empty table: None would leave autograd with the old one.
            param._post_accumulate_grad_hooks = OrderedDict()  # type: ignore[attr-defined]  # not in the stubs
    return hooks


def _accumulated(param: Tensor) -> Hooks:
    return getattr(param, "_post_accumulate_grad_hooks", None) or {}


def refuse_hooks(model: nn.Module, *, offloaded: bool) -> None:
    """Raises: PlanError for hooks that would not do what they do on one device.

    offloaded: whether an optimizer on the host takes gradients during backward.
    """
    hooks = hooks_of(model)
    for table, kind in ((hooks.gradient, "register_hook"), (hooks.accumulated, "register_post_accumulate_grad_hook")):
        for name, functions in table.items():
            if offloaded:
                raise PlanError(
                    f"parallelize: parameter {name!r} has a hook ({kind}), which needs the gradient of the whole step, but "
                    "an optimizer on the host takes gradients during backward. Remove the hook, or keep the optimizer on the "
                    "device."
                )
            for function in functions.values():
                if held := _holds(function):
                    raise PlanError(
                        f"parallelize: the hook on parameter {name!r} ({kind}) holds {held}, which is about the parameters "
                        "as they are before they are split. Remove the hook, and step or change gradients after "
                        "forward_backward."
                    )


def _holds(function: Any) -> str:
    """What a hook reads besides its argument, if that is an optimizer or a parameter; else empty."""
    seen: list[Any] = []
    while isinstance(function, partial):
        seen += [*function.args, *function.keywords.values()]
        function = function.func
    seen.append(getattr(function, "__self__", None))
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        seen += [*variables.nonlocals.values(), *variables.globals.values(), *(function.__defaults__ or ())]
    for value in seen:
        inside = list(value.items()) if isinstance(value, dict) else [(value,)]
        inside = [(item,) for item in value] if isinstance(value, list | tuple | set) else inside
        for item in (item for pair in inside for item in pair):
            if isinstance(item, torch.optim.Optimizer):
                return "an optimizer"
            if isinstance(item, nn.Parameter):
                return "a parameter"
    return ""


def set_aside(hooks: ParameterHooks, model: nn.Module) -> dict[str, Tensor]:
    """Take away the gradients of earlier steps that hooked parameters have: hooks get the gradient of this step alone."""
    before = {}
    for name, param in hooks.hooked(model):
        if param.grad is not None:
            before[name], param.grad = param.grad, None
    return before


@torch.no_grad()
def run_hooks(hooks: ParameterHooks, model: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Run the hooks on the step's gradients, after its last backward. before: see `set_aside`.

    Wire: for each parameter with a hook, an all-gather of its gradient over the axes that shard it, and with
    `register_post_accumulate_grad_hook` one of the parameter.
    """
    for name, param in hooks.hooked(model):
        if param.grad is not None and (functions := hooks.gradient.get(name)):
            grad = full_tensor(param.grad).clone()
            for function in list(functions.values()):
                changed = _call(function, grad, name)
                grad = grad if changed is None else changed
            _write(param.grad, grad, name)
        if name in before:
            param.grad = before[name] if param.grad is None else before[name] + param.grad
        if param.grad is not None and (functions := hooks.accumulated.get(name)):
            whole = nn.Parameter(full_tensor(param).clone())
            whole.grad = full_tensor(param.grad).clone()
            version = whole._version
            for function in list(functions.values()):
                _call(function, whole, name)
            if whole._version != version:
                _write(param, whole.detach(), name)
            if whole.grad is None:
                param.grad = None
            else:
                _write(param.grad, whole.grad, name)


def _call(function: Callable[[Any], Any], value: Tensor, name: str) -> Any:
    try:
        return function(value)
    except Exception as error:
        raise PlanError(
            f"the hook on parameter {name!r} raised {type(error).__name__}: {error}. On a mesh it runs after the step's last "
            "backward, on a plain copy of the full parameter or gradient. Change it so that it needs no more, or remove it."
        ) from error


def _write(target: Tensor, full: Tensor, name: str) -> None:
    """Put this rank's part of a full tensor into its shard."""
    if not isinstance(full, Tensor) or full.shape != target.shape:
        told = list(full.shape) if isinstance(full, Tensor) else type(full).__name__
        raise PlanError(f"the hook on parameter {name!r} made {told} of a gradient of shape {list(target.shape)}.")
    local_tensor(target).copy_(full[local_slices(target)])
