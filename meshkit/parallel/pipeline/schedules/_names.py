"""Names of the pipeline schedules, for command lines and recipes."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from meshkit.errors import PlanError
from meshkit.parallel.pipeline._table import Schedule

from ._auto import auto
from ._dualpipe_v import dualpipe_v
from ._hanayo import hanayo
from ._one_f_one_b import gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
from ._v import v_half, v_min, zbv

Generator = Callable[..., Schedule]
"""(ranks, microbatches), and by keyword what its own docstring says."""

# In the order in which help texts and refusals list them: from the plain ones to the search.
NAMES: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dualpipe_v,
    "hanayo": hanayo,
    "auto": auto,
}


def named(name: str) -> Generator:
    """`named("zb-h1")` is `zb_h1`. Raises: PlanError with the nearest name."""
    if name not in NAMES:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), NAMES, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise PlanError(f"there is no schedule {name!r}. {hint}The schedules are {', '.join(NAMES)}.")
    return NAMES[name]
