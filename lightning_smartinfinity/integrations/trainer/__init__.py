"""The strategy of Lightning's Trainer, its callback, and what a resumed fit needs of callbacks and loops."""
