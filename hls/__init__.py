"""What the SmartSSD's accelerator runs, how it is built for the card, and how it is emulated without one."""
