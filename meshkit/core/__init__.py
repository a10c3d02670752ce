"""Mechanism that knows no feature."""
