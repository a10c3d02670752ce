from meshkit.strategy._memory import *  # noqa: F403  # TEMPORARY: rewritten by the move
from meshkit.strategy._memory import Kept as Kept
from meshkit.strategy._memory import RecomputeMode as RecomputeMode
from meshkit.strategy._memory import States as States
