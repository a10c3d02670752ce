"""An algorithm as a graph of calls of models, each on a mesh of its own, one after the other or some iterations apart."""

from meshkit.algos.dataflow._call import Call as Call
from meshkit.algos.dataflow._call import Sample as Sample
from meshkit.algos.dataflow._call import Sync as Sync
from meshkit.algos.dataflow._flow import Flow as Flow
from meshkit.algos.dataflow._program import Row as Row
from meshkit.algos.dataflow._program import program as program
