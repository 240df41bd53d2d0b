"""Writing an engine's checkpoint, immediately or in the background."""
