"""``smart-infinity simulate``: training steps in virtual time."""
