"""Makes a Hugging Face folder of sharded safetensors with random weights, and compares a model with such a folder."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

SHARD_BYTES = 500_000_000
_CHUNK = 1 << 24  # elements that are drawn at a time
_SPREAD = 0.02
_INDEX = "model.safetensors.index.json"

Shapes = list[tuple[str, torch.Size]]


def make_folder(folder: Path, config: Any) -> Path:
    """Make a folder for ``from_pretrained``, in bf16, with random weights of a fixed seed; return it.

    The memory that this takes does not grow with the model: values are drawn and written in chunks.

    Args:
        folder: The folder, which must not exist.
        config: transformers' configuration of the model.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shards = list(_in_shards([(name, param.shape) for name, param in model.named_parameters()]))
    folder.mkdir()
    model.config.dtype = torch.bfloat16
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    generator, file_of = torch.Generator().manual_seed(0), {}
    for number, shapes in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(path, shapes, generator)
        file_of |= {name: path.name for name, _ in shapes}
    total = sum(2 * shape.numel() for shapes in shards for _, shape in shapes)
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}))
    return folder


def num_different(model: nn.Module, folder: Path) -> int:
    """Return how many of a partitioned model's parameters differ in any bit from the folder's.

    Args:
        model: The model that was loaded from the folder.
        folder: The folder.
    """
    import deepspeed
    from safetensors import safe_open

    file_of = json.loads((folder / _INDEX).read_text())["weight_map"]
    params, different = dict(model.named_parameters()), set(file_of) ^ {name for name, _ in model.named_parameters()}
    for name in params.keys() & file_of.keys():
        # A file that is opened for one weight is not mapped any more when the next one is compared.
        with deepspeed.zero.GatheredParameters(params[name]), safe_open(folder / file_of[name], framework="pt") as file:
            if not torch.equal(params[name].detach().view(torch.int16), file.get_tensor(name).view(torch.int16)):
                different.add(name)
    return len(different)


def _in_shards(shapes: Shapes) -> Iterator[Shapes]:
    """Yield the weights of each file; a file has one weight at least."""
    shard: Shapes = []
    for each in shapes:
        if shard and 2 * sum(shape.numel() for _, shape in [*shard, each]) > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(each)
    yield shard


def _write_shard(path: Path, shapes: Shapes, generator: torch.Generator) -> None:
    """Write a file of safetensors: the header's length, the header, and the values of each weight."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes:
        begin, end = end, end + 2 * shape.numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns values to 8 bytes
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for numel in _chunks(shape.numel() for _, shape in shapes):
            values = torch.empty(numel, dtype=torch.bfloat16).normal_(std=_SPREAD, generator=generator)
            file.write(values.view(torch.uint8).numpy())


def _chunks(numels: Iterable[int]) -> Iterator[int]:
    for numel in numels:
        yield from [_CHUNK] * (numel // _CHUNK)
        if numel % _CHUNK:
            yield numel % _CHUNK
