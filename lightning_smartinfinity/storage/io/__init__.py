"""Calls to the system: limits of time, order, and errors in our words."""
