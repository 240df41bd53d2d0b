"""Writes folders of safetensors files, which ``from_pretrained`` loads if they hold a model of transformers.

Tensors that a checkpoint lacks are read from the original model's files.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.common.progress import Advance, showing_progress
from lightning_smartinfinity.common.transformers_models import Model, ModelDescription, optional_package
from lightning_smartinfinity.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_smartinfinity.export.checksums import CHECKSUMS_NAME, HEADER, ExportChecksums, read_checksums
from lightning_smartinfinity.export.companions import Origin, write_companions
from lightning_smartinfinity.export.destination import require_room, staged
from lightning_smartinfinity.export.names import plan_for
from lightning_smartinfinity.export.routes import ExportPlan, plain_plan, router
from lightning_smartinfinity.export.shards import Shards, writing_shards
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import WINDOW_NUMEL, Put
from lightning_smartinfinity.zero3.checkpoints.formats.trust import require_file
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import Contents, TensorSpec

__all__ = [
    "FolderExport",
    "OriginalWeights",
    "main_dtype",
    "plain_export",
    "pretrained_export",
    "writing_folder",
]


_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class OriginalWeights:
    """The safetensors files in a folder of transformers. What is read is verified, if an export wrote them.

    Args:
        folder: The folder.
        prefix: ``base_model_prefix`` of the model. Names in files of a model without a head lack it.
    """

    def __init__(self, folder: Path, *, prefix: str) -> None:
        self._folder = folder
        self._prefix = f"{prefix}."
        self._verified: set[str] = set()

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
        """Yield the windows of a flat tensor, each with the index of its first element.

        The values may be overwritten when the next window is read.

        Raises:
            CheckpointError: The file is damaged.
        """
        if self._checksums is not None:
            own = self._own_name(name)
            for begin, block in self._checksums.blocks(self._files[own], own):
                yield begin // spec.dtype.itemsize, torch.from_numpy(block).view(spec.dtype)
            return
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
        self._require_header(file.name)
        return safe_open(file, framework="pt")

    @cached_property
    def _files(self) -> Mapping[str, str]:
        """Name of the file of each tensor."""
        safetensors = optional_package("safetensors", purpose=f"Reading the weights in {self._folder}")
        try:
            if (self._folder / _INDEX).is_file():
                self._require_header(_INDEX)
                return dict(json.loads((self._folder / _INDEX).read_text())["weight_map"])
            require_file(self._folder / _WEIGHTS)
            self._require_header(_WEIGHTS)
            with safetensors.safe_open(self._folder / _WEIGHTS, framework="pt") as file:
                return dict.fromkeys(file.keys(), _WEIGHTS)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{self._folder} holds no readable safetensors files: {error}.",
                "Pass a folder with model.safetensors as --model.",
            ) from error

    @cached_property
    def _checksums(self) -> ExportChecksums | None:
        checksums = read_checksums(self._folder)
        if checksums is None:
            warnings.warn(
                f"{self._folder} has no {CHECKSUMS_NAME}, so damage of the weights that are read from it would not be "
                "noticed.",
                stacklevel=2,
            )
        return checksums

    def _require_header(self, file: str) -> None:
        if self._checksums is not None and file not in self._verified:
            self._checksums.require(file, HEADER)
            self._verified.add(file)


_SMALL_FILES_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FolderExport:
    """Content of an exported folder.

    Args:
        contents: The available weights.
        plan: The weights in the folder.
        dtype: Dtype of the trained weights in the folder.
        description: The model of transformers; None if there is none.
        origins: Folders of the model before it was trained.
        originals: Supplies the weights that are not in ``contents``.
        max_shard_size: Bytes of a file, or text such as ``"5GB"``; None means one file.
    """

    contents: Contents
    plan: ExportPlan
    dtype: torch.dtype
    description: ModelDescription | None = None
    origins: Sequence[Origin] = ()
    originals: OriginalWeights | None = None
    max_shard_size: int | str | None = None

    @property
    def names(self) -> set[str]:
        """Names of the parameters whose values are exported."""
        origins = {origin for origin, _ in self.plan.ranges.values()}
        return {self.contents.aliases.get(name, name) for name in origins} & self.contents.parameters.keys()


def pretrained_export(
    model: Model,
    description: ModelDescription,
    contents: Contents,
    *,
    dtype: torch.dtype | None,
    origins: Sequence[Origin],
    folder: Path | None = None,
    max_shard_size: int | str | None = None,
) -> FolderExport:
    """Describe the export of a model of transformers.

    Args:
        model: The model; its weights are not used.
        description: Its description.
        contents: The available weights, by the model's names.
        dtype: Dtype of trained weights; None for the dtype of training.
        origins: Folders of the model before it was trained, which supply small files, the preferred one first.
        folder: Folder of the model before it was trained, which supplies missing weights.
        max_shard_size: As for ``save_pretrained`` of transformers; None for its default.

    Raises:
        SmartInfinityError: The model cannot be exported; the message says why.
    """
    plan = plan_for(model, contents, dtype=dtype)
    originals = None
    if plan.others:
        originals = OriginalWeights(_required(folder, plan), prefix=model.base_model_prefix)
        others = {name: originals.spec(name, spec.shape) for name, spec in plan.others.items()}
        plan = ExportPlan(tensors=plan.tensors, ranges=plan.ranges, others=others)
    return FolderExport(
        contents=contents,
        plan=plan,
        dtype=main_dtype(contents, dtype),
        description=description,
        origins=origins,
        originals=originals,
        max_shard_size=_default_shard_size() if max_shard_size is None else max_shard_size,
    )


def plain_export(
    contents: Contents, *, dtype: torch.dtype | None, max_shard_size: int | str | None = None
) -> FolderExport:
    """Describe the export of a module as one file with the module's own names.

    Args:
        contents: The available weights.
        dtype: Dtype of trained weights; None for the dtype of training.
        max_shard_size: Must be None, because there is only one file.

    Raises:
        ConfigError: ``max_shard_size`` is not None.
        UnsupportedError: The module has state that is not a tensor.
    """
    if max_shard_size is not None:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r} does not apply: the module holds no known model of transformers, and "
            "is written as one file.",
            "Leave it out.",
        )
    if contents.others:
        raise UnsupportedError(
            f"{next(iter(contents.others))!r} of the module is no tensor, and safetensors files hold nothing else.",
            "Export --to lightning.",
        )
    return FolderExport(contents=contents, plan=plain_plan(contents, dtype=dtype), dtype=main_dtype(contents, dtype))


@contextmanager
def writing_folder(target: Path, export: FolderExport, *, keeps_others: bool = False) -> Iterator[Put]:
    """Make a folder, which is complete when the context ends. If the body raises, ``target`` does not change.

    Args:
        target: Path of the folder.
        export: Its content.
        keeps_others: Whether the folder may exist; its files stay, except for older weights.

    Yields:
        Function that must be called with all values of ``export.names``.

    Raises:
        StorageError: The folder cannot be written.
    """
    plan = export.plan
    require_room(target, plan.nbytes + _SMALL_FILES_BYTES)
    with (
        staged(target, keeps_others=keeps_others) as folder,
        showing_progress("Exporting", plan.nbytes, shown=True) as advance,
    ):
        folder.mkdir()
        if export.description is not None:
            write_companions(export.description, folder, dtype=export.dtype, origins=export.origins)
        with writing_shards(folder, {**plan.tensors, **plan.others}, max_shard_size=export.max_shard_size) as shards:
            put = router(plan, export.contents, shards.write, advance)
            for name, buffer in export.contents.buffers.items():
                put(name, 0, buffer.flatten())
            yield put
            _write_originals(export, shards, advance)


def main_dtype(contents: Contents, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that describes a model's weights: the wanted one, or that of the trained weights."""
    if dtype is not None:
        return dtype
    floats = [spec for spec in contents.specs().values() if spec.dtype.is_floating_point]
    return next((spec.dtype for spec in sorted(floats, key=lambda spec: not spec.trained)), torch.float32)


def _write_originals(export: FolderExport, shards: Shards, advance: Advance) -> None:
    for name, spec in export.plan.others.items():
        assert export.originals is not None
        for begin, values in export.originals.windows(name, spec):
            shards.write(name, begin, values)
            advance(values.nbytes)


def _required(folder: Path | None, plan: ExportPlan) -> Path:
    if folder is None:
        raise UnsupportedError(
            f"The checkpoint lacks {next(iter(plan.others))!r} and {len(plan.others) - 1} more weights: it was saved "
            "without its frozen parameters (exclude_frozen_parameters=True).",
            "Pass the folder of the model before the training as --model: it has them.",
        )
    return folder


def _default_shard_size() -> int | str:
    transformers = optional_package("transformers", purpose="Exporting a model of transformers")
    parameters = inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters
    size: int | str = parameters["max_shard_size"].default
    return size
