"""A meeting place for replicas of local updates that are jobs of their own, and come and go."""

from ._meeting_place import MeetingPlace as MeetingPlace
from ._rules import MeetingRules as MeetingRules
from ._server import PlaceServer as PlaceServer
