"""Rewards (verifiers, code in a sandbox, reward models): scores of rollouts, in parallel, with a time limit, on a mesh."""

from meshkit.sandbox import SandboxLimits as SandboxLimits
from meshkit.sandbox import Verdict as Verdict
from meshkit.sandbox import run_sandboxed as run_sandboxed
from ._model import model_scores as model_scores
from ._pool import RewardPool as RewardPool
from ._score import MeshScores as MeshScores
from ._score import Reward as Reward
from ._score import Score as Score
from ._score import Scorer as Scorer
from ._score import Scores as Scores
from ._score import Unscored as Unscored
from ._score import score as score
from ._score import score_on_mesh as score_on_mesh
from ._score import weighted_sum as weighted_sum
from ._verifiers import UnitTests as UnitTests
from ._verifiers import arithmetic as arithmetic
from ._verifiers import calculate as calculate
from ._verifiers import countdown as countdown
from ._verifiers import exact_match as exact_match
