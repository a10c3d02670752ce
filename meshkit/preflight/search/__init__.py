"""Search: all strategies of a space, cheapest first, until none that is left could be better."""

from ._drawing import svg as svg
from ._goal import Goal as Goal
from ._result import Found as Found
from ._result import Neighbour as Neighbour
from ._result import Tried as Tried
from ._search import search as search
from ._space import Space as Space
