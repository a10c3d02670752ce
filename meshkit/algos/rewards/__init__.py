"""What answers are worth: verifiers, code in a sandbox, trained models; scored side by side, with a time limit, on ranks."""

from meshkit.algos.rewards._score import Reward as Reward
from meshkit.algos.rewards._score import Score as Score
from meshkit.algos.rewards._mesh import MeshScores as MeshScores
from meshkit.algos.rewards._mesh import score_on_mesh as score_on_mesh
from meshkit.algos.rewards._model import model_scores as model_scores
from meshkit.algos.rewards._pool import RewardPool as RewardPool
from meshkit.algos.rewards._sandbox import SandboxLimits as SandboxLimits
from meshkit.algos.rewards._sandbox import Verdict as Verdict
from meshkit.algos.rewards._sandbox import run_sandboxed as run_sandboxed
from meshkit.algos.rewards._score import Scorer as Scorer
from meshkit.algos.rewards._score import Scores as Scores
from meshkit.algos.rewards._score import Unscored as Unscored
from meshkit.algos.rewards._score import score as score
from meshkit.algos.rewards._score import weighted_sum as weighted_sum
from meshkit.algos.rewards._unit_tests import UnitTests as UnitTests
from meshkit.algos.rewards._verifiers import arithmetic as arithmetic
from meshkit.algos.rewards._verifiers import countdown as countdown
from meshkit.algos.rewards._verifiers import exact_match as exact_match
