"""Preflight: explain, estimate, forecast, check, goodput, energy, ... look at a run before it starts, and change nothing."""

from meshkit.preflight import check as check
from meshkit.preflight import energy as energy
from meshkit.preflight import estimate as estimate
from meshkit.preflight import explain as explain
from meshkit.preflight import goodput as goodput
from meshkit.preflight import forecast as forecast
from meshkit.preflight import observe as observe
from meshkit.preflight import order as order
from meshkit.preflight import page as page
from meshkit.preflight import placement as placement
from meshkit.preflight import scaling as scaling
from meshkit.preflight import search as search
from meshkit.preflight import waits as waits
