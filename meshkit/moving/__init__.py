"""Moving a running job to another strategy in process (elastic resharding, runtime adaptation), bit for bit."""

from ._experts import bring_home as bring_home
from ._experts import experts_at_home as experts_at_home
from ._experts import move_experts as move_experts
from ._move import move as move
