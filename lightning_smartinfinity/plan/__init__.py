"""Room for planning: probing a machine's devices, a cost model, a planner, and a simulator in virtual time.

Nothing is built yet. It reads the arithmetic of ``transfer`` (layout and schedule are free of I/O and clocks for this
reason), so that what is simulated is what runs.
"""
