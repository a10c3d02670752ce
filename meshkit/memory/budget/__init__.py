"""Choosing for every block what is cheapest within a budget of activation memory."""
