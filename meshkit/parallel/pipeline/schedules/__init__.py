"""Generators of pipeline schedules: each makes the table for any number of ranks and of microbatches.

In their docstrings p is `ranks`, m is `microbatches`, i is a rank; F, B = I + W, I and W are the times of the ops.
"""

from ._auto import auto as auto
from ._dualpipe_v import dualpipe_v as dualpipe_v
from ._hanayo import hanayo as hanayo
from ._one_f_one_b import interleaved as interleaved
from ._names import NAMES as NAMES
from ._names import Generator as Generator
from ._names import named as named
from ._one_f_one_b import gpipe as gpipe
from ._one_f_one_b import one_f_one_b as one_f_one_b
from ._one_f_one_b import zb_h1 as zb_h1
from ._one_f_one_b import zb_h2 as zb_h2
from ._skip_pipe import skip_pipe as skip_pipe
from ._v import v_half as v_half
from ._v import v_min as v_min
from ._v import zbv as zbv
