"""Preflight: explain, estimate, check, page and observe look at a run before it starts, and change nothing."""

from meshkit.preflight import page as page
