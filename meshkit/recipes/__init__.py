"""What the recipes in examples/ share: their command-line flags, and the session that owns files and clocks. No maths."""

from meshkit.algos.evaluation import bits_per_byte as bits_per_byte
from meshkit.algos.evaluation import nats_per_token as nats_per_token
from meshkit.algos.evaluation import pair_means as pair_means
from meshkit.algos.export import export_model as export_model
from .flags import InstructionFlags as InstructionFlags
from .flags import LearnFlags as LearnFlags
from .flags import LoraFlags as LoraFlags
from .flags import ModelFlags as ModelFlags
from .flags import PairFlags as PairFlags
from .flags import ParallelFlags as ParallelFlags
from .flags import PretrainFlags as PretrainFlags
from .flags import RunFlags as RunFlags
from .flags import StepFlags as StepFlags
from .flags import TextFlags as TextFlags
from .flags import TrainFlags as TrainFlags
from .inputs import chat_encoder as chat_encoder
from .inputs import instruction_examples as instruction_examples
from .inputs import instruction_rows as instruction_rows
from .inputs import preference_rows as preference_rows
from .inputs import text_encoder as text_encoder
from .inputs import text_tokens as text_tokens
from .sample import write_sample as write_sample
from .session import Session as Session
from .session import print0 as print0
