"""Searched plans of reinforcement learning (ReaLHF, execution plan, placement): ranks and layout of each call."""

from ._costs import Cost as Cost
from ._costs import Costs as Costs
from ._costs import PlannedModel as PlannedModel
from ._costs import score_loss as score_loss
from ._drawing import svg as svg
from ._period import Steady as Steady
from ._places import PlanSpace as PlanSpace
from ._plan import PlannedRun as PlannedRun
from ._plan import plan_rl as plan_rl
from ._plan import problem_of as problem_of
from ._problem import Alternative as Alternative
from ._problem import Choice as Choice
from ._problem import Problem as Problem
from ._result import RLPlan as RLPlan
from ._result import read_meshes as read_meshes
from ._search import Found as Found
from ._search import evaluate as evaluate
from ._search import search_plan as search_plan
