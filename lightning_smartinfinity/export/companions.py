"""The small files beside the weights: the configuration, the tokenizer and the like."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.export.models import ModelDescription

__all__ = ["has_tokenizer", "write_companions"]

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.spm", "*.model")
_COPIED = (
    *_TOKENIZER_FILES,
    "special_tokens_map*",
    "added_tokens*",
    "chat_template*",
    "*preprocessor*",
    "processor_config*",
    "generation_config.json",
)
_DTYPE_KEYS = ("dtype", "torch_dtype")


def write_companions(
    description: ModelDescription, folder: Path, *, dtype: torch.dtype, origins: Sequence[Path]
) -> list[str]:
    """Write config.json, and copy the small files of the model from the first of some folders that has any.

    Args:
        description: The model.
        folder: Folder of the export.
        dtype: Dtype of the weights, which from_pretrained reads in config.json.
        origins: Folders of the model before it was trained.

    Returns:
        Names of the files that were copied.

    Raises:
        UnsupportedError: The model needs code of its own, and no folder has it.
        OSError: A file could not be read or written.
    """
    config = json.loads(description.config)
    _set_dtype(config, str(dtype).removeprefix("torch."))
    config["architectures"] = [description.name]
    copied = _copy(origins, folder, (*_COPIED, "*.py") if "auto_map" in config else _COPIED)
    if "auto_map" in config and not any(name.endswith(".py") for name in copied):
        raise UnsupportedError(
            f"{description.name} needs code of its own (auto_map in config.json), which is not in "
            f"{', '.join(map(str, origins)) or 'any folder'}.",
            "Pass the folder of the model with its *.py files as --model.",
        )
    (folder / "config.json").write_text(_text(config))
    if description.generation_config is not None:
        (folder / "generation_config.json").write_text(_text(json.loads(description.generation_config)))
    return copied


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has files of a tokenizer."""
    return any(_matches(file.name, _TOKENIZER_FILES) for file in folder.iterdir())


def _copy(origins: Sequence[Path], folder: Path, patterns: Sequence[str]) -> list[str]:
    for origin in origins:
        files = sorted(file for file in origin.iterdir() if file.is_file() and _matches(file.name, patterns))
        if files:
            for file in files:
                shutil.copyfile(file, folder / file.name)
            return [file.name for file in files]
    return []


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # Weights have such names, too: model.safetensors.index.json, pytorch_model.bin, spiece.model.
    return any(fnmatch(name, pattern) for pattern in patterns) and not name.endswith((".safetensors", ".bin"))


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype of a configuration, and of those inside it that have one."""
    for value in config.values():
        if isinstance(value, dict) and any(key in value for key in _DTYPE_KEYS):
            _set_dtype(value, dtype)
    for key in _DTYPE_KEYS:
        config.pop(key, None)
    config["dtype"] = dtype


def _text(content: object) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
