"""Checks kernels without the synthesis tool: pragmas, DATAFLOW and synthesisability.

A kernel without findings may still be refused by v++.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hls.description import Design
from hls.lint.dataflow import check_dataflow
from hls.lint.pragmas import check_pragmas
from hls.lint.roles import check_roles
from hls.lint.source import Finding, Source
from hls.lint.synthesis import check_synthesis

__all__ = ["Finding", "lint"]

_ROOT = Path(__file__).parents[2]


def lint(design: Design, sources: Path, *, root: Path = _ROOT) -> list[Finding]:
    """Check all kernels of a design.

    Args:
        design: Kernels and compute units.
        sources: Folder with the kernels' sources, as ``hls/sources.py`` writes it.
        root: Folder that has ``hls``. Headers come from ``hls/include`` and ``hls/kernels``; headers that replace the
            toolchain's come from ``hls/sim/include``.
    """
    files = [sources / f"{kernel.name}.cpp" for kernel in design.kernels]
    missing = [Finding(str(file), 1, "is missing") for file in files if not file.exists()]
    if missing:
        return missing
    include = [root / "hls/include", root / "hls/kernels", sources]
    parsed = [Source(file, include=include, stand_ins=root / "hls/sim/include") for file in files]
    return sorted({finding for source in parsed for finding in _check(source)})


def _check(source: Source) -> Iterator[Finding]:
    if source.errors:
        yield from source.errors
        return
    yield from check_pragmas(source)
    unsynthesisable = [finding for top in source.tops for finding in check_synthesis(source, top)]
    yield from unsynthesisable
    # Streams are followed through calls, which ends only if no function calls itself.
    if not unsynthesisable:
        for top in source.tops:
            yield from check_dataflow(source, top)
            yield from check_roles(source, top)
