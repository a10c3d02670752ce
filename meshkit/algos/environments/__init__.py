"""Environments (multi-turn rollouts, tool use, agents): what a policy does over several turns, and what it earns for it."""

from ._chat import chat_turns as chat_turns
from ._calculator import Calculator as Calculator
from ._calculator import run_python as run_python
from ._guessing import GuessingGame as GuessingGame
from ._play import Player as Player
from ._play import episode_scores as episode_scores
from ._pool import EnvironmentPool as EnvironmentPool
from ._protocol import Action as Action
from ._protocol import Environment as Environment
from ._protocol import Observation as Observation
from ._verifiers import VerifiersEnvironment as VerifiersEnvironment
from ._verifiers import verifiers_rows as verifiers_rows
