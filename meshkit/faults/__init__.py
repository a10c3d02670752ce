"""Faults: watchdog, heartbeat, alerts, page, calls, locations of failed ranks, stragglers, links, NaN guard, corruption."""

from ._run_main import run_main as run_main
from .alerts import Alert as Alert
from .calls import read_calls as read_calls
from .corruption import CorruptionGuard as CorruptionGuard
from .crew import Restarts as Restarts
from .links import Link as Link
from .location import Location as Location
from .location import location_now as location_now
from .location import location_of as location_of
from .location import register_modules as register_modules
from .nan_guard import NonFiniteGuard as NonFiniteGuard
from .stragglers import Report as Report
from .stragglers import Stragglers as Stragglers
from .watchdog import send_alert as send_alert
from .watchdog import watch_with as watch_with
