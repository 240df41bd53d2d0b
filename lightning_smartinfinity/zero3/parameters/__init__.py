"""ZeRO-3's partitioned parameters: where they lie, how they are gathered, and who writes them outside of steps."""
