"""Windows of bytes out of a folder of real text, as a LightningDataModule."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

HELD_OUT_EVERY = 20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


class TextFolder(L.LightningDataModule):
    """Bytes of the files below a folder; every twentieth file is held out.

    Args:
        data: Folder of text; default: the sources of the Python standard library that runs this.
        pattern: Which files, as ``Path.rglob`` takes it.
        block_size: Bytes the model sees at once.
        batch_size: Windows per micro-batch and process.
        max_bytes: Read no more than this.
        num_val_windows: Held-out windows that one validation takes, over all processes.
        seed: Chooses and orders files and windows.
    """

    def __init__(
        self,
        data: str | None = None,
        pattern: str = "*.py",
        block_size: int = 128,
        batch_size: int = 16,
        max_bytes: int = 8_000_000,
        num_val_windows: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(block_size, batch_size, max_bytes, num_val_windows) < 1:
            raise ValueError("block_size, batch_size, max_bytes and num_val_windows must be at least 1.")
        self.folder = Path(data or sysconfig.get_path("stdlib")).expanduser()
        self.pattern = pattern
        self.block_size = block_size
        self.batch_size = batch_size
        self.max_bytes = max_bytes
        self.num_val_windows = num_val_windows
        self.seed = seed
        self.train_windows: Windows | None = None
        self.val_windows: Windows | None = None

    def setup(self, stage: str) -> None:
        if self.train_windows is not None:
            return
        files = find_files(self.folder, self.pattern)
        random.Random(self.seed).shuffle(files)
        held_out = files[::HELD_OUT_EVERY]
        train = [file for index, file in enumerate(files) if index % HELD_OUT_EVERY]
        self.train_windows = Windows(train, self.block_size, self.max_bytes)
        self.val_windows = Windows(held_out, self.block_size, self.max_bytes)

    def train_dataloader(self) -> DataLoader[Tensor]:
        trainer = self.trainer
        assert trainer is not None and self.train_windows is not None
        per_step = self.batch_size * trainer.accumulate_grad_batches
        # With plain Lightning, too, a resumed run goes on where the steps ended.
        sampler = EndlessSampler(
            len(self.train_windows),
            seed=self.seed,
            rank=trainer.global_rank,
            num_ranks=trainer.world_size,
            start=trainer.global_step * per_step,
        )
        return FromStep(self.train_windows, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Tensor]:
        trainer = self.trainer
        assert trainer is not None and self.val_windows is not None
        # Every rank gets as many, since a ZeRO-3 forward needs them all.
        per_rank = max(1, min(self.num_val_windows, len(self.val_windows)) // trainer.world_size)
        chosen = range(trainer.global_rank, per_rank * trainer.world_size, trainer.world_size)
        spread = len(self.val_windows) / (per_rank * trainer.world_size)
        mine = [int(index * spread) for index in chosen]
        return DataLoader(self.val_windows, batch_size=self.batch_size, sampler=mine)


class Windows(Dataset[Tensor]):
    """Consecutive windows of ``block_size + 1`` bytes that overlap by one byte: uint8 ``[block_size + 1]``."""

    def __init__(self, files: list[Path], block_size: int, max_bytes: int) -> None:
        self.block_size = block_size
        self.bytes = read_bytes(files, max_bytes)
        if len(self) == 0:
            raise ValueError(
                f"{len(files)} files with {len(self.bytes)} bytes in all are too little text for windows of"
                f" {block_size + 1} bytes. Choose a larger folder or a smaller block size."
            )

    def __len__(self) -> int:
        return max(0, (len(self.bytes) - 1) // self.block_size)

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * self.block_size : (index + 1) * self.block_size + 1]


class FromStep(DataLoader[Tensor]):
    """A DataLoader whose sampler begins at the Trainer's step. It has a state, so that nothing else skips batches."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load nothing: the sampler has begun at the step."""


class EndlessSampler(Sampler[int]):
    """Goes through all windows in a new random order each time, from any point on; every rank takes its share."""

    def __init__(self, num_windows: int, *, seed: int, rank: int, num_ranks: int, start: int) -> None:
        self.num_windows = num_windows
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.start = start

    def __iter__(self) -> Iterator[int]:
        position = self.start * self.num_ranks + self.rank
        epoch, order = -1, torch.empty(0)
        while True:
            if epoch != position // self.num_windows:
                epoch = position // self.num_windows
                order = torch.randperm(self.num_windows, generator=torch.Generator().manual_seed(self.seed + epoch))
            yield int(order[position % self.num_windows])
            position += self.num_ranks


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files below a folder in a fixed order, without tests and installed packages."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder.")
    files = [
        file
        for file in sorted(folder.rglob(pattern))
        if file.is_file() and not SKIPPED_FOLDERS & set(file.relative_to(folder).parts[:-1])
    ]
    if len(files) < 2:
        raise ValueError(
            f"{folder} holds {len(files)} files like {pattern!r}: one to train on and one to hold out are needed."
        )
    return files


def read_bytes(files: list[Path], max_bytes: int) -> Tensor:
    """Return the files one after the other, uint8 ``[bytes]``."""
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
