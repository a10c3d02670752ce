"""Faults: watchdog and heartbeat, locations of failed ranks, stragglers, NaN guard, silent data corruption."""

from ._run_main import run_main as run_main
from .corruption import CorruptionGuard as CorruptionGuard
from .location import Location as Location
from .location import location_now as location_now
from .location import location_of as location_of
from .location import register_modules as register_modules
from .nan_guard import NonFiniteGuard as NonFiniteGuard
from .stragglers import Report as Report
from .stragglers import Stragglers as Stragglers
