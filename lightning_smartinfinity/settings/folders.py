"""Resolves and checks the storage folders that settings name."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.settings.rules import Rule, as_passed, check, optional, require_distinct

__all__ = ["LOCAL_FOLDER", "launched_as", "names_file", "resolved_folder", "storage_folders"]

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_VARIABLE = re.compile(r"\$\w+|\$\{[^}]*\}", re.ASCII)
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")  # one slash: Path collapses two into one


def _listed(storage: Any) -> list[Any]:
    return list(storage) if isinstance(storage, (list, tuple)) else [storage]


LOCAL_FOLDER = Rule(
    "Pass a local folder on a drive of this machine",
    lambda folder: _URL.match(str(folder)) is None and "\0" not in str(folder),
    "is a URL or has a null byte, and cannot be a folder",
)
"""Rule for a folder that can be storage. Path would parse the URL ``s3://bucket/x`` as a folder named ``s3:``."""

_FOLDERS = Rule(
    "Pass a folder or a list of folders",
    lambda storage: (
        bool(_listed(storage)) and all(isinstance(one, (str, Path)) and str(one) for one in _listed(storage))
    ),
    "names no folder",
    _listed,
)


def names_file(value: object) -> bool:
    """Return whether a value can be the path of a file."""
    return isinstance(value, (str, os.PathLike)) and bool(str(value)) and "\0" not in str(value)


def storage_folders(storage: object, *, owner: str, setting: str = "storage") -> tuple[Path, ...] | None:
    """Resolve the folders that the setting ``storage`` names, or return None if the user chose none.

    Args:
        storage: The setting.
        owner: Class or command to which it was passed, for the error.
        setting: Name of the setting, for the error.

    Raises:
        ConfigError: The setting names a path that is no local folder, or a folder twice.
    """
    given = check(owner, setting, storage, optional(_FOLDERS))
    if given is None:
        return None
    passed = as_passed(owner, setting, storage)
    folders = tuple(resolved_folder(folder, setting=passed, has_variables=True) for folder in given)
    require_distinct(passed, folders)
    return folders


def resolved_folder(folder: str | Path, *, setting: str, has_variables: bool = False) -> Path:
    """Return the absolute path of a folder, with links and ``~`` (the user's home) resolved.

    Args:
        folder: The folder, which need not exist.
        setting: The setting that names it, with its owner, for the error.
        has_variables: Whether to also replace environment variables (``$SLURM_TMPDIR``), ``{node}`` by the machine's
            host name, and ``{local_rank}`` by the process's local rank from the launcher.

    Raises:
        ConfigError: The path cannot be a local folder's, or it names a variable that is not set.
    """
    if not LOCAL_FOLDER.holds(folder):
        raise ConfigError(f"{setting} {LOCAL_FOLDER.fault}.", f"{LOCAL_FOLDER.remedy}.")
    try:
        path = _filled(os.fspath(folder), setting=setting) if has_variables else folder
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, links in a circle, a null byte
        raise ConfigError(f"{setting} cannot be a folder: {error}.", "Pass the path of a folder.") from error


def launched_as() -> str:
    """Return the local rank that the launcher gave to this process; "0" without a launcher."""
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0")


def _filled(folder: str, *, setting: str) -> str:
    """Return a path with its variables replaced by their values."""
    folder = folder.replace("{node}", platform.node()).replace("{local_rank}", launched_as())
    filled = os.path.expandvars(folder)
    unset = next((name for name in _VARIABLE.findall(folder) if name.strip("${}") not in os.environ), None)
    if unset is not None:
        raise ConfigError(
            f"{setting} names the environment variable {unset}, which is not set on {platform.node()}.",
            "Set it for every process, or write the path out.",
        )
    return filled
