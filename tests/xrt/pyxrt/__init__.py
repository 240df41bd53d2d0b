"""pyxrt for the tests: the system's own where it has one, else ``module.cpp``, built once.

Both must match ``signatures_2.13.json``, which was read from the genuine module of XRT 2.13.
"""

from tests.xrt.pyxrt.build import built, load
from tests.xrt.pyxrt.current import current

__all__ = ["built", "current", "load"]
