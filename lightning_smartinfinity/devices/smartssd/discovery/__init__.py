"""Finds what a machine has of SmartSSDs: cards, the SSDs beside them, XRT and the xclbin. Opens no card."""
