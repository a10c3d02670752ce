"""The single-device model of a run that moves, without values: as `parallelize` got it, with what has changed since."""

from __future__ import annotations

from torch import nn

from meshkit.core.model_state import copies_of
from meshkit.moving._agree import gathered
from meshkit.step import Run


def like_running(run: Run) -> nn.Module:
    """Parameters on meta; which of them are trained, and which modules are in training, as in the run.

    Buffers are copies: of the run where this rank has the module, else those of before the split. What else was set on
    modules after `parallelize` is not carried.
    Wire: an all-gather of what has changed, over the mesh, as objects.
    """
    model = run.full_model
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    copies = copies_of(run.model)
    running = {name: module for name, module in run.model.named_modules() if name in modules}

    def changed() -> tuple[dict[str, bool], dict[str, bool]]:
        trained = {copies.get(name, name): param.requires_grad for name, param in run.named_parameters()}
        return (
            {name: value for name, value in trained.items() if params[name].requires_grad != value},
            {name: module.training for name, module in running.items() if modules[name].training != module.training},
        )

    for trained, training in gathered(run.mesh, changed):
        for name, value in trained.items():
            params[name].requires_grad_(value)
        for name, value in training.items():
            modules[name].training = value
    for name, module in modules.items():
        for key, buffer in module._buffers.items():
            now = running[name]._buffers.get(key) if name in running else None
            module._buffers[key] = buffer if buffer is None else (buffer if now is None else now).clone()
    return model
