"""Distillation (knowledge distillation, GKD, on-policy distillation): a student learns the distributions of teachers."""

from ._distillation import Distillation as Distillation
from ._objective import distill_objective as distill_objective
from ._teacher import teacher_call as teacher_call
from ._teacher import teacher_values as teacher_values
