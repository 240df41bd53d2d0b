"""The package exports all that the native core has, and nothing that is for tests."""

from __future__ import annotations

import lightning_smartinfinity.native as native
import lightning_smartinfinity.native._core as core
from tests.helpers import native_testing


def test_everything_public_is_exported() -> None:
    """The package re-exports the module; what is for tests is imported by them alone."""
    public = {name for name in vars(core) if not name.startswith("_")}
    exported = {name for name in vars(native) if not name.startswith("_")}
    assert set(core.__all__) | set(native_testing.__all__) == public
    assert set(core.__all__) <= exported
    assert not exported & set(native_testing.__all__)
