"""The package exports everything in the native core but the names for tests."""

from __future__ import annotations

import lightning_smartinfinity.native as native
import lightning_smartinfinity.native._core as core
from tests.helpers import native_testing


def test_everything_public_is_exported() -> None:
    """The package re-exports the core's public names. Only tests import the names for tests."""
    public = {name for name in vars(core) if not name.startswith("_")}
    exported = {name for name in vars(native) if not name.startswith("_")}
    assert set(core.__all__) | set(native_testing.__all__) == public
    assert set(core.__all__) <= exported
    assert not exported & set(native_testing.__all__)
