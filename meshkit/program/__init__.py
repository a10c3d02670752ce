"""The program: what the model does, read once from the user's module, without values."""

from ._program import Program as Program
from ._program import read_program as read_program
