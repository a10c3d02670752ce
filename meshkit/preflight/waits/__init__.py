"""Waits: where the host waits for its device in a step, and how many operators it launches, counted without a GPU."""

from ._record import recording as recording
from ._step import Step as Step
from ._step import Wait as Wait
from ._step import Waits as Waits
