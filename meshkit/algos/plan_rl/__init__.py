"""Searched plans of reinforcement learning (ReaLHF, execution plan, placement): which ranks and which layout each call has."""

from ._period import Steady as Steady
from ._problem import Alternative as Alternative
from ._problem import Problem as Problem
from ._search import Found as Found
from ._search import evaluate as evaluate
from ._search import search_plan as search_plan
