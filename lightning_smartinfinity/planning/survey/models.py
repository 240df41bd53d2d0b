"""Finds the sizes of a model without allocating it."""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_smartinfinity.common.fake_tensors import fake_tensors
from lightning_smartinfinity.common.transformers_models import optional_package
from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.planning.model import LlamaShape, ModelFigures, Passes, llama_shape
from lightning_smartinfinity.planning.survey.passes import UNCOUNTED, count_passes, transformer_in
from lightning_smartinfinity.settings.rules import num_parameters
from lightning_smartinfinity.storage.io.os_errors import in_short

__all__ = [
    "ModelSource",
    "default_dtype",
    "find_source",
    "survey_model",
    "turns_checkpoints_on",
    "with_transformer",
    "without_weights",
]

_LEAST, _MOST = 10**6, 10**12
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 100  # characters
_REMEDY = "Pass a folder with a config.json, package.module:Class, or a number of parameters such as 7B or 124M."


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that can be built.

    Args:
        name: Display name.
        assumed: Assumptions about the model, in words.
        build: Function that builds the module; None if only a shape is known.
        build_with: Function that builds a model of transformers from another configuration.
        shape: Shape of a model of which only the number of parameters is known.
        config: transformers' configuration of the model; None for other models.
    """

    name: str
    build: Callable[[], nn.Module] | None = None
    build_with: Callable[[Any], nn.Module] | None = None
    assumed: str = ""
    shape: LlamaShape | None = None
    config: Any = None


def find_source(spec: str, *, arguments: Mapping[str, Any] | None = None) -> ModelSource:
    """Find the model that a user named.

    Args:
        spec: Folder or config.json of a Hugging Face model, ``package.module:Class``, or a number such as ``"7B"``.
        arguments: Arguments of the class.

    Raises:
        ConfigError: The model does not exist, or the text is not a model's name.
        UnsupportedError: transformers is missing or has no such model.
    """
    number = num_parameters(spec)
    if arguments is not None and (number is not None or not _CLASS.fullmatch(spec)):
        raise ConfigError(f"--init-args are for a class, and MODEL={spec!r} is none.", "Leave them out.")
    if number is not None:
        return _from_number(number, spec)
    if _CLASS.fullmatch(spec) and not os.path.exists(spec):
        return _from_class(spec, dict(arguments or {}))
    path = Path(os.path.expanduser(spec))
    if os.path.isdir(path) and not (path / "config.json").is_file():
        raise ConfigError(f"The folder {spec!r} has no config.json.", _REMEDY)
    if os.path.isfile(path) and path.suffix != ".json":
        raise ConfigError(f"The file {spec!r} is no config.json.", _REMEDY)
    if not os.path.exists(path):
        if _HUB_NAME.fullmatch(spec):
            return _from_hub(spec)
        raise ConfigError(f"MODEL={spec[:_SHOWN]!r} is no folder, no file, no class and no number.", _REMEDY)
    return _from_folder(path)


def survey_model(source: ModelSource, *, batch: int, seq: int, in_16_bit: bool = True) -> ModelFigures:
    """Count a model's parameters, and the bytes and operations of a forward and backward.

    Args:
        source: The model.
        batch: Sequences of a micro-batch.
        seq: Tokens of a sequence.
        in_16_bit: Whether parameters are bf16 or fp16; if not, they are fp32.

    Raises:
        ConfigError: The class cannot be built with these arguments.
    """
    if source.build is None:
        assert source.shape is not None
        sizes = source.shape.sizes()
        return ModelFigures(
            name=source.name,
            trained=sizes,
            num_layers=source.shape.layers,
            largest_module=max(sizes),
            passes=source.shape.passes(batch=batch, seq=seq),
            assumed=f"{source.assumed}; activations by a formula, as transformers is not installed",
        )
    dtype = torch.bfloat16 if in_16_bit else torch.float32
    with default_dtype(dtype), fake_tensors() as fake:
        module, why = _built_without_memory(source)
        trained = tuple(p.numel() for p in module.parameters() if p.requires_grad)
        if not trained:
            raise ConfigError(f"{source.name} has no parameter to train.", "Build its layers in __init__.")
        checkpointing = turns_checkpoints_on(transformer_in(module))
        passes, missing = (None, why) if why else count_passes(module, batch=batch, seq=seq)

        @lru_cache
        def count(other_batch: int) -> Passes | None:
            with default_dtype(dtype), fake:
                return count_passes(module, batch=other_batch, seq=seq)[0]

        return ModelFigures(
            name=source.name,
            trained=trained,
            frozen=tuple(p.numel() for p in module.parameters() if not p.requires_grad),
            buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
            num_layers=_num_layers(module),
            largest_module=max(sum(p.numel() for p in each.parameters(recurse=False)) for each in module.modules()),
            passes=passes,
            count=count,
            checkpointing=checkpointing,
            assumed="; ".join(filter(None, (source.assumed, missing))),
        )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype while the body runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _built_without_memory(source: ModelSource) -> tuple[nn.Module, str]:
    """Build a model on fake tensors; if that fails, build it on the meta device and explain why it cannot run."""
    assert source.build is not None
    try:
        return source.build(), ""
    except ConfigError as error:
        with suppress(ConfigError), torch.device("meta"):
            return source.build(), f"{UNCOUNTED}: {in_short(error)}"
        raise


def _num_layers(module: nn.Module) -> int:
    """Return the length of the longest ModuleList, assumed to hold the repeated layers."""
    return max((len(each) for each in module.modules() if isinstance(each, nn.ModuleList)), default=1) or 1


def _from_number(numel: int, spec: str) -> ModelSource:
    if not _LEAST <= numel <= _MOST:
        raise ConfigError(f"MODEL={spec!r} is out of range.", "Pass a number of parameters from 1M to 1T.")
    shape = llama_shape(numel)
    words = f"a Llama-like shape: {shape.layers} layers of width {shape.width}, {shape.vocab} tokens"
    try:
        transformers = _transformers()
    except ConfigError:
        return ModelSource(name=spec, shape=shape, assumed=words)
    config = transformers.LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocab,
        use_cache=False,
    )
    return _of_transformers(spec, transformers.LlamaForCausalLM, config, assumed=words)


def _from_folder(path: Path) -> ModelSource:
    transformers = _transformers()
    folder = path if path.is_dir() else path.parent
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers and models' configurations raise anything on bad values
        raise ConfigError(
            f"The configuration in {str(folder)!r} cannot be read: {in_short(error)}.",
            "Pass a model that the installed transformers knows, without code of its own.",
        ) from error
    return _from_config(folder.resolve().name, config)


def _from_hub(name: str) -> ModelSource:
    """Return a model of the hub whose configuration is in this machine's cache."""
    try:
        config = _transformers().AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # transformers raises several types if the file is not in the cache
        raise ConfigError(
            f"MODEL={name!r} is no folder here, and no model in the local cache of the hub.",
            f"Fetch its configuration: hf download {name} config.json. Or pass a folder, or a number such as 7B.",
        ) from error
    return _from_config(name, config)


def _from_config(name: str, config: Any) -> ModelSource:
    transformers = _transformers()
    architectures = getattr(config, "architectures", None)
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise ConfigError(
            f"The config.json of {name!r} names no architectures.",
            'Add the class of the model to it, such as "architectures": ["LlamaForCausalLM"].',
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{name!r} is quantized (quantization_config), and its weights cannot be trained.",
            "Plan for the model from which it was made.",
        )
    model_class = getattr(transformers, architectures[0], None)
    if model_class is None:
        raise UnsupportedError(
            f"The installed transformers has no class {architectures[0]!r}.",
            "Install a newer version: pip install -U transformers.",
        )
    return _of_transformers(f"{name} ({architectures[0]})", model_class, config)


def _of_transformers(name: str, model_class: Any, config: Any, *, assumed: str = "") -> ModelSource:
    return ModelSource(
        name=name, build=partial(_built, model_class, config), build_with=model_class, config=config, assumed=assumed
    )


def _built(model_class: Any, config: Any) -> nn.Module:
    try:
        model: nn.Module = model_class(config)
    except Exception as error:  # a model's own code may raise anything on unknown values
        raise ConfigError(
            f"{model_class.__name__} cannot be built from its configuration: {in_short(error)}.",
            "Mend config.json, or install a version of transformers that knows the model.",
        ) from error
    return model


def _from_class(spec: str, arguments: dict[str, Any]) -> ModelSource:
    module_name, _, class_name = spec.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except (Exception, SystemExit) as error:  # the module's own code may raise anything
        raise ConfigError(
            f"MODEL={spec!r}: the module {module_name!r} cannot be imported: {in_short(error)}.",
            "Run the command in the folder that holds it, or install its package.",
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"MODEL={spec!r}: {module_name!r} has no LightningModule or torch module {class_name!r}.",
            "Name a class of that module.",
        )
    return ModelSource(name=spec, build=lambda: _constructed(found, arguments))


def _constructed(found: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    try:
        with without_weights():
            module = found(**arguments)
            configure = getattr(module, "configure_model", None)
            if callable(configure):
                configure()
    except (Exception, SystemExit) as error:  # the class's own code may raise anything
        raise ConfigError(
            f"{found.__name__} cannot be built with the arguments {arguments}: {in_short(error)}.",
            "Pass its arguments as JSON: --init-args '{\"width\": 1024}'. Or pass the folder of the model itself.",
        ) from error
    return module


@contextmanager
def without_weights() -> Iterator[None]:
    """Make ``from_pretrained`` of transformers' models build them from configurations only, without weights."""
    try:
        modeling = importlib.import_module("transformers.modeling_utils")
    except ImportError:
        yield
        return
    # From `__dict__`: getattr would return the method bound to this class, which subclasses would then call.
    original = modeling.PreTrainedModel.__dict__["from_pretrained"]

    def build(cls: type[Any], /, name: Any = None, *_: Any, config: Any = None, **__: Any) -> Any:
        return cls(cls.config_class.from_pretrained(name, local_files_only=True) if config is None else config)

    modeling.PreTrainedModel.from_pretrained = classmethod(build)
    try:
        yield
    finally:
        modeling.PreTrainedModel.from_pretrained = original


def with_transformer(source: ModelSource) -> ModelSource:
    """Return a source for the only transformers model inside the source's module, or the source itself."""
    if source.config is not None or source.build is None:
        return source
    with fake_tensors():
        model = transformer_in(source.build())
    return source if model is None else _of_transformers(source.name, type(model), copy.deepcopy(model.config))


def turns_checkpoints_on(model: Any) -> bool:
    """Return whether a transformers model has activation checkpoints enabled; False for None.

    The new attribute is asked for first, because the old one warns.
    """
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(type(model), name)), False))


def _transformers() -> Any:
    return optional_package("transformers", purpose="Reading a Hugging Face model")
