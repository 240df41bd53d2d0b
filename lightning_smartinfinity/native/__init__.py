"""The native core: I/O, update kernels, checksums and the transfer schedule, in C++.

It does not know torch: memory is passed as integer addresses, and the caller keeps it alive until the batch that names
it has been finished.
"""

from __future__ import annotations

from lightning_smartinfinity.native._core import *  # noqa: F403
