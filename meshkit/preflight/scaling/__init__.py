"""Scaling curve (tokens/s and GPU-hours against ranks), and batch advice from the gradient noise scale."""

from ._batch import BatchAdvice as BatchAdvice
from ._batch import BatchChoice as BatchChoice
from ._batch import batch_advice as batch_advice
from ._curve import Point as Point
from ._curve import ScalingCurve as ScalingCurve
from ._curve import StepForecast as StepForecast
from ._curve import scaling_curve as scaling_curve
from ._drawing import svg as svg
