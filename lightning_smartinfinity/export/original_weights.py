"""Reads tensors that a checkpoint lacks from the safetensors files of the original model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.common.transformers_models import optional_package
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import WINDOW_NUMEL
from lightning_smartinfinity.zero3.checkpoints.formats.trust import require_file
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import TensorSpec

__all__ = ["OriginalWeights"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class OriginalWeights:
    """The safetensors files in a folder of transformers.

    Args:
        folder: The folder.
        prefix: ``base_model_prefix`` of the model. Names in files of a model without a head lack it.
    """

    def __init__(self, folder: Path, *, prefix: str) -> None:
        self._folder = folder
        self._prefix = f"{prefix}."

    def spec(self, name: str, shape: torch.Size) -> TensorSpec:
        """Return a tensor's shape, and its dtype in the files.

        Raises:
            CheckpointError: There is no such tensor, or its shape differs.
        """
        with self._opened(name) as file:
            found = file.get_slice(self._own_name(name))
            if torch.Size(found.get_shape()) != shape:
                raise CheckpointError(
                    f"{name!r} of {self._folder} has the shape {tuple(found.get_shape())}, not {tuple(shape)}.",
                    "Pass the folder of the model that was trained as --model.",
                )
            return TensorSpec(shape, found[:0].dtype if shape else file.get_tensor(self._own_name(name)).dtype)

    def windows(self, name: str, spec: TensorSpec) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the windows of a flat tensor, each with the index of its first element."""
        with self._opened(name) as file:
            if not spec.shape:
                yield 0, file.get_tensor(self._own_name(name)).reshape(1)
                return
            row = spec.numel // max(1, spec.shape[0])
            rows = max(1, WINDOW_NUMEL // max(1, row))
            for begin in range(0, spec.shape[0], rows):
                yield begin * row, file.get_slice(self._own_name(name))[begin : begin + rows].flatten()

    def _own_name(self, name: str) -> str:
        names = (name, name.removeprefix(self._prefix), self._prefix + name)
        found = next((candidate for candidate in names if candidate in self._files), None)
        if found is None:
            raise CheckpointError(
                f"Neither the checkpoint nor {self._folder} has the weight {name!r}.",
                "Pass the folder of the model that was trained, with its safetensors files, as --model.",
            )
        return found

    def _opened(self, name: str) -> Any:
        from safetensors import safe_open

        file = self._folder / self._files[self._own_name(name)]
        require_file(file)
        return safe_open(file, framework="pt")

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """Name of the file of each tensor."""
        safetensors = optional_package("safetensors", purpose=f"Reading the weights in {self._folder}")
        try:
            if (self._folder / _INDEX).is_file():
                return dict(json.loads((self._folder / _INDEX).read_text())["weight_map"])
            require_file(self._folder / _WEIGHTS)
            with safetensors.safe_open(self._folder / _WEIGHTS, framework="pt") as file:
                return dict.fromkeys(file.keys(), _WEIGHTS)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{self._folder} holds no readable safetensors files: {error}.",
                "Pass a folder with model.safetensors as --model.",
            ) from error
