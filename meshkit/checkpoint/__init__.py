"""Distributed checkpoints: asynchronous save, resume on any mesh (resharding), and saving on a preemption signal."""

from meshkit.checkpoint._checkpointer import Checkpointer as Checkpointer
from meshkit.checkpoint._foreign import load_dcp as load_dcp
from meshkit.checkpoint._signals import SaveOnSignal as SaveOnSignal
