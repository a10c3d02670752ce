"""Values of a state_dict as JSON and safetensors, so that to read them runs nothing and unpickles nothing.

JSON holds None, bool, int, float, str, lists, and dicts whose keys are strings. All else is an object with the key "is":

| is       | has                                                                              |
|----------|----------------------------------------------------------------------------------|
| `tensor` | `at`: its name in the safetensors beside                                         |
| `tuple`  | `items`: a list; a torch.Size and a named tuple come back as plain tuples        |
| `set`    | `items`: a list                                                                  |
| `dict`   | `items`: pairs, of a dict with other keys, or with the key "is"                  |
| `bytes`  | `hex`: a text                                                                    |
| `dtype`  | `name`: a text, such as float32                                                  |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """(JSON, tensors by name, copied to the host). Raises: TypeError for what is none of these."""
    tensors: dict[str, Tensor] = {}
    return _encode(value, tensors), tensors


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `encode` was given. Raises: LookupError, TypeError or ValueError for JSON that it did not write."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "is" not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    match value["is"]:
        case "tensor":
            return tensors[value["at"]]
        case "tuple":
            return tuple(decode(item, tensors) for item in value["items"])
        case "set":
            return {decode(item, tensors) for item in value["items"]}
        case "dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in value["items"]}
        case "bytes":
            return bytes.fromhex(value["hex"])
        case "dtype":
            return dtype_of(value["name"])
        case other:
            raise ValueError(f"it holds a {other!r}, which no state has")


def dtype_of(name: str) -> torch.dtype:
    """Raises: ValueError for what is no dtype of this torch."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it holds a tensor of {name!r}, which this torch does not have")
    return dtype


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    # type() and not isinstance: a subclass of int or str, such as an Enum, would come back as another thing.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"is": "tensor", "at": name}
    if type(value) is list:
        return [_encode(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"is": "tuple", "items": [_encode(item, tensors) for item in value]}
    if type(value) in (set, frozenset):
        return {"is": "set", "items": [_encode(item, tensors) for item in sorted(value, key=repr)]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and "is" not in value:
            return {key: _encode(item, tensors) for key, item in value.items()}
        return {"is": "dict", "items": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if type(value) in (bytes, bytearray):
        return {"is": "bytes", "hex": value.hex()}
    if isinstance(value, torch.dtype):
        return {"is": "dtype", "name": str(value).removeprefix("torch.")}
    raise TypeError(f"it holds a {type(value).__name__}")
