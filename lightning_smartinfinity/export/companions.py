"""The small files of an export in addition to the weights, such as the configuration and the tokenizer.

A checkpoint names the folder from which its model was loaded. A checkpoint from an untrusted source could name any
folder of the user, and the user may publish the export. So only the files that :class:`CheckpointOrigin` allows are
copied from such a folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_smartinfinity.common.transformers_models import ModelDescription
from lightning_smartinfinity.errors import StorageError, UnsupportedError
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder, Trust

__all__ = ["CheckpointOrigin", "Origin", "has_tokenizer", "origin_of", "write_companions"]

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.spm", "*.model")
_WITH_TOKENIZER = (*_TOKENIZER_FILES, "special_tokens_map*", "added_tokens*")
_COPIED = (
    "chat_template*",
    "*preprocessor*",
    "processor_config*",
    "generation_config.json",
)
_DTYPE_KEYS = ("dtype", "torch_dtype")
_USUAL_NAMES = {
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
}
_MOST_BYTES = 128 << 20  # of a small file: the largest tokenizers have 40 MB


class Origin:
    """A model's folder, from which the user loaded it or which the user named.

    Args:
        folder: Path of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Return the names of the files that may be copied."""
        return sorted(file.name for file in self.folder.iterdir() if file.is_file())

    def copy(self, name: str, to: Path) -> None:
        """Copy a file."""
        shutil.copyfile(self.folder / name, to)


class CheckpointOrigin(Origin):
    """A folder that a checkpoint names: only files of the usual names and sizes, and only if it is a model's folder.

    Links in the folder are not followed, and files that are not regular are left out.
    """

    @override
    def names(self) -> list[str]:
        try:
            with closing(self._opened()) as folder:
                found = [name for name in folder.names() if name in _USUAL_NAMES and _is_small_file(folder, name)]
                return found if _is_small_file(folder, "config.json") else []
        except (OSError, StorageError):  # it is gone, or another user's: then nothing is copied
            return []

    @override
    def copy(self, name: str, to: Path) -> None:
        with closing(self._opened()) as folder, folder.reader(name) as file:
            to.write_bytes(file.read(_MOST_BYTES))

    def _opened(self) -> OpenFolder:
        return OpenFolder(Path(os.path.realpath(self.folder)), trust=Trust.ANY)


def write_companions(
    description: ModelDescription, folder: Path, *, dtype: torch.dtype, origins: Sequence[Origin]
) -> None:
    """Write config.json, and copy each small file of the model from the first origin that has it.

    Args:
        description: The model.
        folder: Folder of the export.
        dtype: Dtype of the weights, which from_pretrained reads from config.json.
        origins: Folders of the model before it was trained.

    Raises:
        UnsupportedError: The model needs its own code, and no folder has it.
        OSError: A file could not be read or written.
    """
    config = json.loads(description.config)
    _set_dtype(config, str(dtype).removeprefix("torch."))
    config["architectures"] = [description.name]
    copied = _copy(origins, folder, (*_COPIED, "*.py") if "auto_map" in config else _COPIED)
    if "auto_map" in config and not any(name.endswith(".py") for name in copied):
        raise UnsupportedError(
            f"{description.name} needs code of its own (auto_map in config.json), which is not in "
            f"{', '.join(str(origin.folder) for origin in origins) or 'any folder'}.",
            "Pass the folder of the model with its *.py files as --model.",
        )
    (folder / "config.json").write_text(_text(config))
    if description.generation_config is not None:
        (folder / "generation_config.json").write_text(_text(json.loads(description.generation_config)))


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder contains a tokenizer's files."""
    return _with_tokenizer(Origin(folder).names())


def origin_of(description: ModelDescription, kind: type[Origin]) -> list[Origin]:
    """Return the folder from which a model was loaded, by its path or by its name in the hub's cache; empty if absent.

    Args:
        description: The model.
        kind: Class of the result if the model was loaded from a path.
    """
    if os.path.isabs(description.origin):
        return [kind(Path(description.origin))] if os.path.isdir(description.origin) else []
    cached = _cached(description.origin) if description.origin else None
    return [] if cached is None else [Origin(cached)]


def _cached(name: str) -> Path | None:
    """Return a model's folder in the local cache of the hub, or None. The hub is not contacted."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not a name of the hub, not cached, or the cache is damaged: then nothing is copied
        return None


def _copy(origins: Sequence[Origin], folder: Path, patterns: Sequence[str]) -> list[str]:
    """Copy each file from the first folder that has it; all of the tokenizer's from one folder, so that they match."""
    sources: dict[str, Origin] = {}
    names_by_origin = {origin: origin.names() for origin in origins}
    tokenizer_from = next((origin for origin, names in names_by_origin.items() if _with_tokenizer(names)), None)
    for origin, names in names_by_origin.items():
        wanted = (*_WITH_TOKENIZER, *patterns) if origin is tokenizer_from else patterns
        for name in names:
            if _matches(name, wanted):
                sources.setdefault(name, origin)
    for name, origin in sources.items():
        origin.copy(name, folder / name)
    return sorted(sources)


def _with_tokenizer(names: Sequence[str]) -> bool:
    return any(_matches(name, _TOKENIZER_FILES) for name in names)


def _is_small_file(folder: OpenFolder, name: str) -> bool:
    try:
        status = folder.status(name)
    except StorageError:  # it is a link, a pipe or the like
        return False
    return status is not None and status.st_size <= _MOST_BYTES


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # Weights have such names, too: model.safetensors.index.json, pytorch_model.bin, spiece.model.
    return any(fnmatch(name, pattern) for pattern in patterns) and not name.endswith((".safetensors", ".bin"))


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype of a configuration, and of nested configurations that have one."""
    for value in config.values():
        if isinstance(value, dict) and any(key in value for key in _DTYPE_KEYS):
            _set_dtype(value, dtype)
    for key in _DTYPE_KEYS:
        config.pop(key, None)
    config["dtype"] = dtype


def _text(content: object) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
