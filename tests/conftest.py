"""What holds for every test."""

import tests.depth  # noqa: F401  # sets how much hypothesis draws
