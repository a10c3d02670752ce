"""Pairs, labelled answers and rewards of steps, for preference learning."""
