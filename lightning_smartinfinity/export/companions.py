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
from lightning_smartinfinity.transformers_models import ModelDescription

__all__ = ["has_tokenizer", "origins_of", "write_companions"]

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.spm", "*.model")
_WITH_TOKENIZER = (*_TOKENIZER_FILES, "special_tokens_map*", "added_tokens*")
_COPIED = (
    "chat_template*",
    "*preprocessor*",
    "processor_config*",
    "generation_config.json",
)
_DTYPE_KEYS = ("dtype", "torch_dtype")


def write_companions(
    description: ModelDescription, folder: Path, *, dtype: torch.dtype, origins: Sequence[Path]
) -> list[str]:
    """Write config.json, and copy each small file of the model from the first of some folders that has it.

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


def origins_of(description: ModelDescription, folder: Path | None) -> list[Path]:
    """Return the folders that may hold small files of a model, the best one first.

    Args:
        description: The model, which may have been loaded from a folder or by a name on the hub that is in the cache.
        folder: The folder that the user named.
    """
    loaded_from = Path(description.origin) if description.origin else None
    if loaded_from is not None and not loaded_from.is_dir():
        loaded_from = _cached(description.origin)
    return [origin for origin in (folder, loaded_from) if origin is not None]


def _cached(name: str) -> Path | None:
    """Return the folder of a model in the cache of the hub, without asking the hub; None if there is none."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # it is no name of the hub, it is not cached, or the cache is damaged: then nothing is copied
        return None


def _copy(origins: Sequence[Path], folder: Path, patterns: Sequence[str]) -> list[str]:
    """Copy files of the first folder that has them; those of the tokenizer fit together, so one folder has them all."""
    sources: dict[str, Path] = {}
    with_tokenizer = next((origin for origin in origins if has_tokenizer(origin)), None)
    for origin in origins:
        wanted = (*_WITH_TOKENIZER, *patterns) if origin == with_tokenizer else patterns
        for file in origin.iterdir():
            if file.is_file() and _matches(file.name, wanted):
                sources.setdefault(file.name, file)
    for name, file in sources.items():
        shutil.copyfile(file, folder / name)
    return sorted(sources)


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
