"""The strategy of Lightning's Trainer, its callback, and support for resuming callbacks and loops."""
