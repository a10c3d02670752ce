"""HTML page of a run before it starts: mesh, memory, traffic and pipeline timeline of every rank.

One HTML file that loads nothing. Its numbers are those of `explain` and `estimate`, on every rank of the mesh.
"""

from ._html import html as html
from ._html import save_html as save_html
from ._page import RankGroup as RankGroup
from ._page import Page as Page
from ._page import explain_page as explain_page
