"""pyxrt, the system's or ours, has the names, overloads and enum values of XRT 2.13."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.helpers.runif import RunIf
from tests.xrt.cards import EmulatedCards
from tests.xrt.pyxrt import current
from tests.xrt.pyxrt.signatures import expected, signatures

pytestmark = RunIf(xrt=True)


def test_signatures(pyxrt: ModuleType) -> None:
    """Overloads agree in types, order and number of arguments, and enumerators in names and values.

    Nothing is newer than 2.13, because a test could come to rely on it.
    """
    assert signatures(pyxrt) == expected()


def test_the_form_of_xrts_master(pyxrt: ModuleType, emulated_cards: EmulatedCards) -> None:
    """It opens kernels in a hardware context of a registered xclbin, and warns of the calls that this replaces."""
    master, path = current(pyxrt), str(emulated_cards.build.probe_xclbin)
    device = master.device(0)
    with pytest.warns(DeprecationWarning, match=r"device\.load_xclbin is deprecated"):
        uuid = device.load_xclbin(path)
    with pytest.warns(DeprecationWarning, match=r"kernel\(device, uuid, name\) is deprecated"):
        before = master.kernel(device, uuid, "probe:{probe_1}", master.kernel.shared)
    registered = device.register_xclbin(master.xclbin(path))
    kernel = master.kernel(master.hw_context(device, registered), "probe:{probe_1}")
    assert registered.to_string() == uuid.to_string() and kernel.group_id(0) == before.group_id(0)
    with pytest.raises(RuntimeError, match="not registered"):
        master.hw_context(device, master.uuid("00000000-0000-0000-0000-000000000000"))
