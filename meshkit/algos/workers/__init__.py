"""Rollout workers (elastic generators): processes of other jobs, at any site, that write rollouts for a trainer.

They get weights by shardcast, know no process group, may be lost at any time, and their groups are given to others.
Validators are jobs that are trusted: with them, what workers bring is learnt after its fingerprints were verified.
"""

from ._flow import WorkerFlow as WorkerFlow
from ._flow import WorkerPolicy as WorkerPolicy
from ._rollouts import GIVES as GIVES
from ._rollouts import prompt_of as prompt_of
from ._rollouts import read_answers as read_answers
from ._server import RolloutServer as RolloutServer
from ._unverified import VerifyPolicy as VerifyPolicy
from ._validator import validate as validate
from ._worker import work as work
