"""The only way for a test to be skipped: marks that name what the machine lacks.

On the machine that runs ``.ci/run`` a test may be skipped for one of :data:`ALLOWED_REASONS` only; any other skip fails
the session (see ``tests/conftest.py``).
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import pytest

from tests.helpers.fuse import why_no_fuse
from tests.helpers.xrt import what_is_missing

NO_BINDFS = "bindfs mounts nothing here"
NO_CUDA = "no CUDA device"
NO_FILE_SYSTEM = "this machine makes no file system of this kind"
NO_LOOP_DEVICE = "this user may not mount an image file"
NO_MOUNTS = "this user's processes may have no mounts of their own"
NO_NAMESPACES = "this machine cannot be two"
NO_ROOT = "this user cannot become another"
ALLOWED_REASONS = (NO_BINDFS, NO_CUDA, NO_FILE_SYSTEM, NO_LOOP_DEVICE, NO_MOUNTS, NO_NAMESPACES, NO_ROOT)


def RunIf(
    *,
    arm: bool = False,
    cuda_devices: int = 0,
    bindfs: bool = False,
    fuse: bool = False,
    package: str | None = None,
    root: bool = False,
    torch_without_cuda: bool = False,
    xrt: bool = False,
) -> pytest.MarkDecorator:
    """Skips a test where the machine lacks what it needs.

    Args:
        arm: Whether the test builds for 64-bit ARM and emulates it, which ``make test-long`` installs if it may.
        cuda_devices: Number of CUDA devices that the test uses.
        bindfs: Whether the test mounts folders by bindfs, which ``make test`` installs if it may.
        fuse: Whether the test mounts a file system of its own, which is possible where ``.ci/run`` runs.
        package: One of the development dependencies, which are all installed where ``.ci/run`` runs.
        root: Whether the test becomes another user.
        torch_without_cuda: Whether the test needs a torch without CUDA, which the emulated device takes the place of.
        xrt: Whether the test needs emulated SmartSSDs, which work wherever ``make test`` could install XRT.
    """
    import torch

    if arm:
        missing = [name for name in ("aarch64-linux-gnu-g++", "qemu-aarch64") if shutil.which(name) is None]
        return pytest.mark.skipif(bool(missing), reason=f"this machine lacks {missing}")
    if bindfs:
        can = shutil.which("bindfs") is not None and os.access("/dev/fuse", os.W_OK)
        return pytest.mark.skipif(not can, reason=NO_BINDFS)
    if root:
        return pytest.mark.skipif(os.geteuid() != 0, reason=NO_ROOT)
    if fuse:
        missing = why_no_fuse()
        return pytest.mark.skipif(missing is not None, reason=f"no FUSE: {missing}")
    if package is not None:
        return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
    if torch_without_cuda:
        return pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA of its own")
    if xrt:
        missing = what_is_missing()
        return pytest.mark.skipif(missing is not None, reason=str(missing))
    present = torch.cuda.device_count()
    return pytest.mark.skipif(present < cuda_devices, reason=f"{NO_CUDA} ({cuda_devices} needed, {present} present)")


def is_allowed(reason: str) -> bool:
    """Return whether CI allows a skip for this reason."""
    return reason.removeprefix("Skipped: ").startswith(ALLOWED_REASONS)
