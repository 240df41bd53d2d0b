"""Parameters that ZeRO-3 partitions: where they are stored, how they are gathered, and how user code reads them."""
