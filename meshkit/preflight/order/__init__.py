"""Order: whether the calls of all ranks end under NCCL's rules, by simulation, without a GPU."""

from ._calls import Call as Call
from ._calls import Event as Event
from ._calls import Group as Group
from ._calls import HostWait as HostWait
from ._calls import Part as Part
from ._calls import Wait as Wait
from ._rules import EAGER as EAGER
from ._rules import LAZY as LAZY
from ._rules import Rules as Rules
from ._rules import deadlock as deadlock
from ._rules import mismatches as mismatches
from ._record import gathered as gathered
from ._record import recording as recording
