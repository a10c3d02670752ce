"""Configuration (command-line flags) of recipes, each flag documented here once; a `Config` inherits those it reads.

A recipe changes a default by naming the field again; tyro shows the text of these files with it. What flags mean together is
a method here, so that it is not decided in ten recipes.
"""

from ._data import InstructionFlags as InstructionFlags
from ._data import PairFlags as PairFlags
from ._data import PretrainFlags as PretrainFlags
from ._data import TextFlags as TextFlags
from ._model import LoraFlags as LoraFlags
from ._model import ModelFlags as ModelFlags
from ._parallel import STRATEGY_FIELDS as STRATEGY_FIELDS
from ._parallel import ParallelFlags as ParallelFlags
from ._policy import CorrectionName as CorrectionName
from ._policy import CriticFlags as CriticFlags
from ._policy import EnvironmentFlags as EnvironmentFlags
from ._policy import PolicyFlags as PolicyFlags
from ._policy import RolloutFlags as RolloutFlags
from ._policy import SampledFlags as SampledFlags
from ._policy import SamplerFlags as SamplerFlags
from ._run import LearnFlags as LearnFlags
from ._run import RunFlags as RunFlags
from ._run import StepFlags as StepFlags
from ._run import RampFlags as RampFlags
from ._run import TrainFlags as TrainFlags
