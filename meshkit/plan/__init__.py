"""The plan (parallelization plan): by name, each module's style on the tensor axis; blocks, FSDP units, initial values."""

from .auto import auto_plan as auto_plan
from .match import match_names as match_names
from .match import match_table as match_table
from .styles import Init as Init
from .styles import Plan as Plan
from .styles import Style as Style
from .styles import attention as attention
from .styles import column as column
from .styles import enter as enter
from .styles import experts as experts
from .styles import head as head
from .styles import per_head as per_head
from .styles import replicate as replicate
from .styles import row as row
from .styles import sequence as sequence
from .styles import split as split
from .styles import vocab as vocab
