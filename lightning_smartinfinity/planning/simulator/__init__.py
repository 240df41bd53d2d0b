"""Simulates a step in virtual time: its machine, its work, and the compared systems."""
