"""Runs the command as ``python -m lightning_smartinfinity.cli``."""

from __future__ import annotations

import sys

from lightning_smartinfinity.cli.main import main

sys.exit(main())
