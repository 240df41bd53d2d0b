"""Writing an engine's checkpoint, at once or in the background."""
