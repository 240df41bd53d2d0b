"""Runs optimizer steps: layout, gradient arena, step plan, update rules and the handler.

Import from the modules: ``layout.partition_layout`` and ``layout.balance`` are arithmetic and import no torch.
"""
