"""Context parallelism (CP; ring attention, Ulysses): a sequence's tokens split over ranks, attention over all of them."""

from ._apply import attention_shape as attention_shape
from ._apply import context_of as context_of
from ._apply import context_parallel as context_parallel
from ._apply import plan_context as plan_context
from ._apply import refuse_counted as refuse_counted
from ._apply import refuse_whole_tokens as refuse_whole_tokens
from ._apply import split_batch as split_batch
from ._scheme import Choice as Choice
from ._scheme import choose as choose
from ._scheme import choose_for_rows as choose_for_rows
from ._cache import notes_of_cache as notes_of_cache
from ._counted import notes_of_counted as notes_of_counted
from ._layout import Layout as Layout
from ._pieces import chain_of as chain_of
from ._doors import Doors as Doors
from ._doors import Mixer as Mixer
from ._reading import Reader as Reader
from ._split import Context as Context
from ._split import SplitMask as SplitMask
from ._traffic import halo_traffic as halo_traffic
from ._traffic import Shape as Shape
from ._traffic import state_traffic as state_traffic
from ._traffic import traffic as traffic
from ._whole import notes_of as notes_of
