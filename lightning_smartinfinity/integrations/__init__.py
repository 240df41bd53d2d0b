"""The three entry points, Lightning's Trainer, Fabric and transformers' Trainer, and the code that they share."""
