"""A run before it starts, on a page: who it is, what each rank sends and holds, and when.

One HTML file that loads nothing. Its numbers are those of `explain` and `estimate`, on every rank of the mesh.
"""

from ._html import html as html
from ._html import save_html as save_html
from ._page import Alike as Alike
from ._page import Page as Page
from ._page import explain_page as explain_page
