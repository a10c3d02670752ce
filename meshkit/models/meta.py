"""Meta-device initialisation: build a model without memory for its parameters, keeping the values of its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Parameters created inside are on meta; buffers are real, so values computed in constructors are kept.

    For modules whose buffers no checkpoint holds, such as the rotary frequencies of transformers models, which
    `torch.device("meta")` would lose. Tied parameters stay tied. Not for several threads at once: it changes how every
    nn.Module registers parameters until it ends.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            # Storage that nobody wrote to yet costs address space and no memory. The twin is kept on the parameter, so
            # that one parameter registered in two modules stays one.
            twin: nn.Parameter | None = getattr(param, "_meta_twin", None)
            if twin is None:
                twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                param.__dict__["_meta_twin"] = twin
            param = twin
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
