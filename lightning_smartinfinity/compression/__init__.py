"""Room for gradient compression on the way to the storage devices: top-k selection with error feedback.

Nothing is built yet. A codec here will turn one tasklet's gradient into fewer bytes before it crosses the shared
channel and be decoded next to the update. It may import ``store``, ``native``, ``config`` and ``errors``; ``transfer``
is its only caller.
"""
