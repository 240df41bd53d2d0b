"""Finds a machine's SmartSSD components: cards, their SSDs, XRT and the xclbin. Opens no card."""
