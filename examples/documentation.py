"""Labelled text, as a LightningDataModule: which package does this passage of documentation come from?

The passages are docstrings of packages that every installation has, so nothing is downloaded. Names of packages are
masked. All passages of a file are either learnt or held out. A file of JSON lines, {"text": "...", "label": "..."},
takes their place if there is one.
"""

from __future__ import annotations

import ast
import ctypes
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
from inputs import lines_of
from pretrained import load_tokenizer
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

PACKAGES = ("python", "networkx", "numpy", "sympy", "torch", "transformers")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
SHORTEST, LONGEST = 100, 300  # characters
PER_FILE = 10
HELD_OUT_EVERY = 4
Labelled = tuple[str, str]


class Passages(L.LightningDataModule):
    """Passages of text and their labels.

    Args:
        model: Folder of the model, or its name on the hub, for its tokenizer.
        labelled: File of JSON lines; default: documentation of installed packages.
        per_label: Passages of each package to learn; a third as many are held out.
        batch_size: Passages per micro-batch and process.
        max_tokens: Longer passages are cut there.
    """

    def __init__(
        self,
        model: str,
        labelled: str | None = None,
        per_label: int = 600,
        batch_size: int = 16,
        max_tokens: int = 64,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.labels: list[str] = []

    def setup(self, stage: str) -> None:
        if self.labels:
            return
        path = self.hparams["labelled"]
        learnt, held_out = documentation(self.hparams["per_label"]) if path is None else read_labelled(Path(path))
        self.labels = sorted({label for _, label in learnt + held_out})
        self.tokenizer = load_tokenizer(self.hparams["model"])
        self.train_passages, self.val_passages = self.tokenized(learnt), self.tokenized(held_out)

    def tokenized(self, passages: list[Labelled]) -> list[dict[str, Any]]:
        """Return what the model takes, a dict for each passage, with its label's number."""
        texts = [text for text, _ in passages]
        found = self.tokenizer(texts, truncation=True, max_length=self.hparams["max_tokens"])
        return [
            {"input_ids": tokens, "labels": self.labels.index(label)}
            for tokens, (_, label) in zip(found["input_ids"], passages, strict=True)
        ]

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.train_passages, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self.val_passages, shuffle=False)

    def loader(self, passages: list[dict[str, Any]], *, shuffle: bool) -> DataLoader[Any]:
        """Return batches of int64 ``input_ids`` and ``attention_mask`` ``[batch, time]`` and ``labels`` ``[batch]``."""
        collate = DataCollatorWithPadding(self.tokenizer)
        return DataLoader(passages, self.hparams["batch_size"], shuffle=shuffle, collate_fn=collate)  # type: ignore[arg-type]


def read_labelled(path: Path) -> tuple[list[Labelled], list[Labelled]]:
    """Return the passages of a file to learn, and every fourth one, which is held out.

    Raises:
        ValueError: The file cannot be read, a line is not labelled, or there is too little.
    """
    passages = []
    for where, line in lines_of(path).items():
        try:
            entry = json.loads(line)
            passages.append((str(entry["text"]), str(entry["label"])))
        except (ValueError, TypeError, KeyError):
            raise ValueError(f'{where} is not {{"text": ..., "label": ...}}.') from None
    if len(passages) < HELD_OUT_EVERY:
        raise ValueError(f"{path} holds {len(passages)} passages: at least {HELD_OUT_EVERY} are needed.")
    learnt = [passage for index, passage in enumerate(passages) if index % HELD_OUT_EVERY]
    return learnt, passages[::HELD_OUT_EVERY]


def documentation(per_label: int) -> tuple[list[Labelled], list[Labelled]]:
    """Return passages of each package to learn, and a third as many of other files, which are held out."""
    learnt: list[Labelled] = []
    held_out: list[Labelled] = []
    for package in PACKAGES:
        files = source_files(package)
        learnt += first([file for index, file in enumerate(files) if index % HELD_OUT_EVERY], per_label, package)
        held_out += first(files[::HELD_OUT_EVERY], -(-per_label // 3), package)
    release_freed_memory()
    return learnt, held_out


def release_freed_memory() -> None:
    """Give the system back what the syntax trees took, so that it does not add to the peak of the training."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def source_files(package: str) -> list[Path]:
    """Return the Python files of a package, in an order that is always the same, and mixes its folders."""
    spec = None if package == "python" else find_spec(package)
    root = Path(spec.submodule_search_locations[0] if spec else sysconfig.get_path("stdlib"))  # type: ignore[index]
    files = [path for path in sorted(root.rglob("*.py")) if not SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    return files


def first(files: list[Path], number: int, package: str) -> list[Labelled]:
    """Return so many different passages, fewer if the files hold no more."""
    found: dict[str, None] = {}
    for file in files:
        found.update(dict.fromkeys(list(passages_of(file))[:PER_FILE]))
        if len(found) >= number:
            break
    return [(text, package) for text in list(found)[:number]]


def passages_of(file: Path) -> Iterator[str]:
    """Yield the beginnings of a file's docstrings, without examples, and without the names of the packages."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = " ".join((ast.get_docstring(node) or "").partition(">>>")[0].split())
            if len(text) >= SHORTEST:
                yield re.sub("|".join(PACKAGES), "it", text[:LONGEST], flags=re.IGNORECASE)
