"""Describes what a training writes, by names and types: ``python -m tests.formats.schemas`` stores it anew.

``schemas.json`` holds the description of each record by its format version. A content that changes without its version
fails :mod:`tests.formats.test_versions`. It also holds the format versions that each version of the package writes:
errors about newer files name the version of the package that reads them.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_smartinfinity import __version__
from lightning_smartinfinity.export.checksums import CHECKSUMS_NAME
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.resume.random_states import RNG_KEY
from lightning_smartinfinity.resume.record_content import read_content
from lightning_smartinfinity.storage.folders.lock import LOCK_NAME
from lightning_smartinfinity.storage.folders.lock_content import LOCK_VERSION
from lightning_smartinfinity.storage.folders.manifest import FORMAT_VERSION, MANIFEST_NAME, read_manifest
from lightning_smartinfinity.storage.folders.rank_folder import open_rank_folder
from lightning_smartinfinity.storage.records import residual_file, training_record
from lightning_smartinfinity.storage.records.training_record import (
    RECORD_VERSION,
    TrainingRecord,
    read_training_records,
)
from lightning_smartinfinity.storage.state import commit_record
from lightning_smartinfinity.zero3.checkpoints.formats.file_checksums import FILE_CHECKSUMS_NAME, write_file_checksums
from lightning_smartinfinity.zero3.checkpoints.formats.format_version import CHECKPOINT_VERSION, EXTRA_KEY
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import CHECKSUMS_VERSION
from lightning_smartinfinity.zero3.checkpoints.formats.whole_file import CHECKSUMS_KEY
from tests.fabric.storage_worker import FabricRun
from tests.fabric.storage_worker import launch as launch_fabric
from tests.formats.earlier import VARIED, converted, extracted, run
from tests.helpers.model_folder import make_model_folder
from tests.huggingface.interrupted import HuggingRun
from tests.huggingface.interrupted import launch as launch_transformers

STORED = Path(__file__).parent / "schemas.json"
KIND = "compressed"
OTHERS = ("fabric", "transformers")
"""Folders of trainings by Fabric and by transformers, which are described by their records alone."""
ARCHIVED = "2026-11-29"
"""The archive whose schemas are stored, too: those of an archived version never change."""

NUMBERS = {
    "lock": LOCK_VERSION,
    "manifest": FORMAT_VERSION,
    "training record": RECORD_VERSION,
    "checkpoint": CHECKPOINT_VERSION,
    "checksums": CHECKSUMS_VERSION,
}
"""The format versions that are written now."""

PACKAGES = "package versions"
"""Key of the format versions that each version of the package writes."""

Schemas = dict[str, dict[str, Any]]


def schema(value: Any, depth: int = 8) -> Any:
    """Return the names and types in a value. Below some depth, and of what a sequence holds, only the types."""
    if isinstance(value, Mapping) and depth > 0:
        return {str(key): schema(value[key], depth - 1) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        members = {json.dumps(schema(member, depth - 1), sort_keys=True) for member in value}
        return [type(value).__name__, *(json.loads(member) for member in sorted(members))]
    if isinstance(value, torch.Tensor):
        return f"Tensor of {value.dtype}"
    return f"ndarray of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__


def written(folder: Path) -> Path:
    """Train in a folder, and return the folder with what the training has written."""
    for kind, where in ((KIND, folder), (VARIED, folder / VARIED)):
        (where / "run").mkdir(parents=True)
        for action in ("fit_and_die", "fit_and_save"):
            run(action, kind, where)
    fabric, transformers = (str(folder / name) for name in OTHERS)
    launch_fabric(FabricRun(fabric, kill_step=2))
    launch_transformers(
        HuggingRun(
            transformers,
            str(make_model_folder(folder / "model")),
            how="kill",
            method="training_step",
            step=2,
            strategy={"storage": f"{transformers}/storage"},
        )
    )
    return converted(folder)


def schemas_of(folder: Path) -> Schemas:
    """Return the schema of each record that a training has written, by kind and format version."""
    values = json.loads((_rank_folder(folder / "run") / MANIFEST_NAME).read_text())
    record = _newest_record(folder / "run")
    engine, loop = read_content(record)
    (optimizer_file,) = (folder / "checkpoint").rglob("*optim_states.pt")
    universal_file = folder / "universal" / "zero" / "optimizer_state.pt"
    of_checkpoint, of_universal = (torch.load(file, weights_only=True) for file in (optimizer_file, universal_file))
    (model_file,) = (folder / "checkpoint").rglob("*model_states.pt")
    checkpoint_version = of_checkpoint["optimizer_state_dict"][EXTRA_KEY]["version"]
    varied = _varied(folder / VARIED)
    return {
        "manifest": {
            str(values["version"]): {
                "manifest": schema({**values, "groups": _names_only(values["groups"])}),
                "commit record": commit_record._FORMAT._header.format,
                "extents": {name: _form(form) for name, form in STATE_FORMATS.items()},
                **varied.get("manifest", {}),
            }
        },
        "training record": {
            str(record.version): {
                "fields": training_record._FORMATS[record.version]._header.format,
                "residual": residual_file._FORMAT._header.format,
                "engine": {key: schema(value, depth=int(key == "counters")) for key, value in engine.items()},
                "loop": schema({**loop, "checkpoint": {}, "books": list(loop.get("books", {}).values())}),
                **_other_loops(folder),
                **varied.get("training record", {}),
            }
        },
        "checkpoint": {
            str(checkpoint_version): {
                "files": sorted(str(file.relative_to(folder / "checkpoint")) for file in _files(folder / "checkpoint")),
                "model states": _ours(torch.load(model_file, weights_only=True)),
                "optimizer states": _ours(of_checkpoint["optimizer_state_dict"]),
                "universal files": sorted(
                    str(file.relative_to(folder / "universal")) for file in _files(folder / "universal")
                ),
                "universal optimizer states": _ours(of_universal),
                **varied.get("checkpoint", {}),
            }
        },
        **_lock(folder / "run"),
        **_checksums_of_exports(folder),
    }


def _rank_folder(run: Path) -> Path:
    (folder,) = run.glob("storage/*/rank-00000")
    return folder


def _lock(run: Path) -> Schemas:
    """Return the schema of a lock, if it has a version: its first lines without numbers, and notes without paths."""
    pid, sealed, *notes = (_rank_folder(run) / LOCK_NAME).read_text().splitlines()
    found = re.match(r"sealed-(\d+)-", sealed)
    begin = [re.sub(r"(?<=-)[0-9a-f]{8}(?=-)|\d+", "N", line) for line in (pid, sealed)]
    described = {"begin": begin, "notes": [note.partition("/")[0] for note in notes]}
    return {} if found is None else {"lock": {found[1]: described}}


def _newest_record(run: Path) -> TrainingRecord:
    with closing(open_rank_folder(_rank_folder(run))) as opened:
        return read_training_records(opened, identity=read_manifest(opened).identity)[0]


def _other_loops(folder: Path) -> dict[str, Any]:
    """Return the schemas of the loop's part in the records of :data:`OTHERS`, if there are any."""
    if not (folder / "fabric").exists():
        return {}
    (_, of_fabric), (_, of_transformers) = (read_content(_newest_record(folder / name)) for name in OTHERS)
    ours = ("batches", "control", "pending", "random", "running", RNG_KEY)  # the rest is of transformers and torch
    described = [
        {key: schema(value, depth=8 if key in ours else 0) for key, value in loop.items()}
        for loop in (of_fabric, of_transformers)
    ]
    return {f"loop of {name}": loop for name, loop in zip(OTHERS, described, strict=True)}


def _varied(folder: Path) -> Schemas:
    """Return the schemas of what a training of :data:`VARIED` writes otherwise, if there is one."""
    if not folder.exists():
        return {}
    values = json.loads((_rank_folder(folder / "run") / MANIFEST_NAME).read_text())
    engine, loop = read_content(_newest_record(folder / "run"))
    (optimizer_file,) = (folder / "checkpoint").rglob("*optim_states.pt")
    (model_file,) = (folder / "checkpoint").rglob("*model_states.pt")
    of_optimizer = torch.load(optimizer_file, weights_only=True)["optimizer_state_dict"]
    scaler = ("dynamic_loss_scale", "loss_scaler", "overflow")
    return {
        "manifest": {f"manifest of {VARIED}": schema({**values, "groups": _names_only(values["groups"])})},
        "training record": {
            f"engine of {VARIED}": {key: schema(engine[key]) for key in scaler},
            f"loop of {VARIED}": schema({**loop, "checkpoint": {}}),
        },
        "checkpoint": {
            f"model states of {VARIED}": _ours(torch.load(model_file, weights_only=True)),
            f"optimizer states of {VARIED}": {
                **_ours(of_optimizer),
                **{key: schema(of_optimizer[key]) for key in scaler},
            },
        },
    }


def _checksums_of_exports(folder: Path) -> Schemas:
    """Return the schemas of checksums, if there are exports for transformers and for Lightning that have some."""
    if not (folder / "export" / CHECKSUMS_NAME).exists():
        return {}
    saved = json.loads((folder / "export" / CHECKSUMS_NAME).read_text())
    (parts,) = saved["files"].values()
    in_file = torch.load(folder / "export.ckpt", weights_only=True)[CHECKSUMS_KEY]
    assert saved["version"] == in_file["version"]
    described = {"file": schema({**saved, "files": sorted(parts)}), "parts": schema([*parts.values()])}
    write_file_checksums(folder, ["export.ckpt"])  # as of a file that transformers stores in a checkpoint
    of_files = schema(json.loads((folder / FILE_CHECKSUMS_NAME).read_text()))
    return {"checksums": {str(saved["version"]): {**described, "entry": schema(in_file), "files": of_files}}}


def _names_only(groups: list[Any]) -> list[Any]:
    """Return parameter groups without their hyperparameters, which differ between torch's versions."""
    return [{} for _ in groups]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _form(form: Any) -> list[Any]:
    return [form.number, list(form.item_bytes(3)), form.granule, form.has_blocks]


def _ours(states: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema(value) for key, value in states.items() if key.startswith("smart_infinity")}


def stored() -> Schemas:
    """Return the stored schemas."""
    schemas: Schemas = json.loads(STORED.read_text())
    return schemas


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as now, tempfile.TemporaryDirectory() as then:
        found = [schemas_of(extracted(ARCHIVED, Path(then)) / KIND), schemas_of(written(Path(now)))]
    merged = {kind: {**found[0].get(kind, {}), **schemas} for kind, schemas in found[1].items()}
    merged[PACKAGES] = {__version__: NUMBERS, **stored()[PACKAGES]}  # those of a version never change
    STORED.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
