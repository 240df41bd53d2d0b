"""The parameters that ZeRO-3 partitions: where they lie and how they are gathered."""
