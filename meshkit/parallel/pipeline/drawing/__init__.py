"""Pictures of a schedule: text for a terminal, SVG and HTML for a page, a trace for chrome://tracing and Perfetto.

Each is a string made from a `Simulation`. Time goes to the right, one lane per rank; a colour is an op, a shade is the
chunk (the first, second, ... stage of the rank). Numbers are in the unit of the `Times` that were simulated.
"""

from meshkit.parallel.pipeline._table import table_text as table_text
from ._svg import Paint as Paint
from ._svg import html as html
from ._svg import svg as svg
from ._text import coloured as coloured
from ._text import summary as summary
from ._text import text as text
from ._trace import record_trace as record_trace
from ._trace import trace as trace
