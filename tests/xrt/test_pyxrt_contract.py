"""pyxrt, the system's or ours, has the names, overloads and enum values of XRT 2.13."""

from __future__ import annotations

from types import ModuleType

from tests.helpers.runif import RunIf
from tests.xrt.pyxrt.signatures import expected, signatures

pytestmark = RunIf(xrt=True)


def test_signatures(pyxrt: ModuleType) -> None:
    """Overloads agree in types, order and number of arguments, and enumerators in names and values.

    Nothing is newer than 2.13, because a test could come to rely on it.
    """
    assert signatures(pyxrt) == expected()
