"""A step in virtual time: its machine, its work, and the systems that are compared."""
