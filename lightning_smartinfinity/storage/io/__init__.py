"""System calls: time limits, scheduling, and translation of errors."""
