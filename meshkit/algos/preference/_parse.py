"""Parser of preference losses in a flag: "sigmoid beta=0.1, sft weight=0.2"."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from meshkit.algos.preference._losses import PreferenceLoss
from meshkit.errors import PlanError

_DEFAULTS = {field.name: field.default for field in fields(PreferenceLoss) if field.name != "kind"}


def parse_losses(text: str) -> tuple[PreferenceLoss, ...]:
    """The losses of a text, separated by commas: each a kind, then its constants as name=value.

    "sigmoid" is DPO; "sigmoid weight=0.8, bco weight=0.2, sft" is MPO. The words are the fields of `PreferenceLoss`.
    Raises: PlanError for an unknown word, a value of the wrong type, and whatever `PreferenceLoss` refuses.
    """
    return tuple(_parse_loss(part, text) for part in text.split(","))


def _parse_loss(part: str, text: str) -> PreferenceLoss:
    kind, *words = part.split() or [""]
    constants: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _DEFAULTS:
            raise PlanError(
                f"losses {text!r}: {word!r} is no constant of {kind!r}. Write name=value, the name one of "
                f"{', '.join(_DEFAULTS)}."
            )
        constants[name] = _value(word, value, _DEFAULTS[name], text)
    return PreferenceLoss(kind=kind, **constants)


def _value(word: str, value: str, default: Any, text: str) -> Any:
    # By the type of the default: the dataclass stays the only place that says what a constant is.
    if isinstance(default, str):
        return value
    # Not bool(value): bool("false") is True.
    if isinstance(default, bool):
        if value in ("true", "false"):
            return value == "true"
        raise PlanError(f"losses {text!r}: {word!r} is neither true nor false.")
    try:
        return float(value)
    except ValueError:
        raise PlanError(
            f"losses {text!r}: {word!r} has no number. Write one, like {word.partition('=')[0]}=0.1."
        ) from None
