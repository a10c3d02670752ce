"""The program: what the model does, read once from the user's module, without values."""

from ._copy import copied as copied
from ._copy import without_values as without_values
from ._example import Example as Example
from ._example import example_of as example_of
from ._fold import fold as fold
from ._live import live as live
from ._program import Program as Program
from ._program import read_program as read_program
from ._proof import Held as Held
from ._proof import Uneven as Uneven
from ._proof import Unproved as Unproved
from ._proof import draws as draws
from ._proof import prove as prove
from ._rules import EXPERTS_OF_PARTS as EXPERTS_OF_PARTS
from ._trace import Fold as Fold
from ._trace import ModuleCall as ModuleCall
from ._trace import Operation as Operation
from ._trace import ReadingError as ReadingError
from ._trace import TensorRef as TensorRef
from ._trace import Trace as Trace
from ._trace import model_line as model_line
from ._trace import tensors as tensors
from ._trace import trace as trace
