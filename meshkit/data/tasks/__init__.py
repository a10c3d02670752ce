"""Small tasks with answers that can be checked, made on the spot."""
