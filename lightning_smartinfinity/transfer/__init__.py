"""How a step moves: layout, gradient arena, step plan, update rules and the handler that runs it.

Import from the modules: ``layout`` and ``plan`` are arithmetic and need no torch, the others do.
"""
