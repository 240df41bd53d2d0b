"""The three doors: Lightning's Trainer, Fabric and transformers' Trainer, and what they share."""
