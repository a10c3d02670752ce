"""Moving a running job to another strategy in process (elastic resharding, runtime adaptation), bit for bit."""

from ._move import move as move
