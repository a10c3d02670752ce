"""Checkpoints that load onto any mesh, and leaving on a signal with one saved."""

from meshkit.checkpoint._checkpointer import Checkpointer as Checkpointer
from meshkit.checkpoint._signals import SaveOnSignal as SaveOnSignal
