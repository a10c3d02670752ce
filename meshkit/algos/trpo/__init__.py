"""Trust region policy optimization (TRPO): the natural gradient by conjugate gradients, and a step within a KL limit."""

from ._natural_gradient import NaturalGradient as NaturalGradient
from ._natural_gradient import natural_gradient as natural_gradient
from ._step import TrpoStep as TrpoStep
from ._step import trpo_step as trpo_step
