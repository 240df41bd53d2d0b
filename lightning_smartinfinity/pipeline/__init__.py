"""Runs optimizer steps: layout, gradient arena, step plan, update rules and the handler.

Import from the modules: ``layout`` and ``balance`` are arithmetic and import no torch.
"""
