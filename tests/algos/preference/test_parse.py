"""A line of text is the losses that it says, and says what is wrong with it."""

from __future__ import annotations

import pytest

from meshkit.algos.preference import PREFERENCE_KINDS, PreferenceLoss, parse_losses
from meshkit.errors import PlanError


def test_a_line_is_its_losses() -> None:
    assert parse_losses("sigmoid") == (PreferenceLoss(),)
    found = parse_losses(
        "simpo beta=2 margin=1.5 label_smoothing=0.1 , sft weight=0.2,hinge average=true divergence=js"
    )
    assert found == (
        PreferenceLoss(kind="simpo", beta=2.0, margin=1.5, label_smoothing=0.1),
        PreferenceLoss(kind="sft", weight=0.2),
        PreferenceLoss(kind="hinge", average=True, divergence="js"),
    )
    free = [kind for kind in PREFERENCE_KINDS if kind != "exo" and not parse_losses(kind)[0].needs_reference]
    assert free == ["orpo", "simpo", "nll", "sft"]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "kind='' is not known"),
        ("sigmoid,", "kind='' is not known"),
        ("sigmoid beta", "'beta' is no constant of 'sigmoid'. Write name=value"),
        ("sigmoid bta=1", "'bta=1' is no constant of 'sigmoid'"),
        ("sigmoid beta=much", "'beta=much' has no number. Write one, like beta=0.1"),
        ("hinge average=yes", "'average=yes' is neither true nor false"),
        ("simpo divergence=js", "kind='simpo' has no use for divergence='js'"),
    ],
)
def test_a_line_that_says_nothing_is_refused(text: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        parse_losses(text)
