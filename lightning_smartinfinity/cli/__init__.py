"""Room for the ``smart-infinity`` command, on top of everything else.

Nothing is built yet. It will inspect and recover state stores, probe devices and print plans.
"""
