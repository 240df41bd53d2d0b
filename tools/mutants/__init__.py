"""Measures what the tests find: makes small changes to the code, mutants, and runs the tests that reach them."""
