"""Distributed checkpoints: asynchronous and in-memory saves, resume on any mesh (resharding), saving on a preemption."""

from meshkit.checkpoint._checkpointer import Checkpointer as Checkpointer
from meshkit.checkpoint._foreign import load_dcp as load_dcp
from meshkit.checkpoint._signals import SaveOnSignal as SaveOnSignal
from meshkit.checkpoint.in_memory import InMemory as InMemory
