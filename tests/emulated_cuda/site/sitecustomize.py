"""Installs the emulated CUDA device as an interpreter starts, if the environment names its library."""

import ctypes
import os
import sys
from pathlib import Path

if "SMART_INFINITY_EMULATED_CUDA" in os.environ:
    # Torch's import asks whether there is CUDA and remembers the answer.
    ctypes.CDLL(os.environ["SMART_INFINITY_EMULATED_CUDA"])
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.emulated_cuda.install import install

    del sys.path[0]
    install()
