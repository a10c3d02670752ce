"""What looks at a run before it starts, and changes nothing: explain, estimate, check, page, observe."""

from meshkit.preflight import page as page
