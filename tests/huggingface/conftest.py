"""A model folder for all tests of this folder, which run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.model_folder import make_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small Llama-shaped model and its tokenizer."""
    return make_model_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(autouse=True, scope="module")
def _on_the_cpu() -> Iterator[None]:
    # DeepSpeed chooses a device once per process, and the other tests choose the CPU.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
