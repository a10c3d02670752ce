"""Dataflow (RL orchestration): calls of several models, each on a mesh of its own, in turn or asynchronously (staleness)."""

from ._buffer import Buffer as Buffer
from ._buffer import Groups as Groups
from ._call import SOURCE as SOURCE
from ._call import Call as Call
from ._call import Sample as Sample
from ._call import Sync as Sync
from ._flow import Flow as Flow
from ._generation_call import generation_call as generation_call
from ._program import Row as Row
from ._program import program as program
from ._rl import PROMPTED as PROMPTED
from ._rl import ROLLOUT as ROLLOUT
from ._rl import completion_call as completion_call
from ._rl import first_unscored as first_unscored
from ._rl import log_prob_call as log_prob_call
from ._rl import reward_call as reward_call
from ._rl import rollout_call as rollout_call
from ._rl import rollout_of as rollout_of
from ._work import Kind as Kind
from ._work import Work as Work
from ._stream_call import StreamCall as StreamCall
from ._stream_call import StreamWriter as StreamWriter
from ._stream_flow import StreamFlow as StreamFlow
