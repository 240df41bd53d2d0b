"""Checks kernels without the synthesis tool: pragmas, DATAFLOW, synthesisability, and agreement with the description.

A kernel without findings may still be refused by v++.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hls import signatures
from hls.description import Design, Kernel
from hls.lint.dataflow import check_dataflow
from hls.lint.pragmas import check_pragmas
from hls.lint.signature import check_masters, check_top
from hls.lint.source import Finding, Source
from hls.lint.synthesis import check_synthesis

__all__ = ["Finding", "lint"]

_ROOT = Path(__file__).parents[2]
_STAND_INS = Path(__file__).with_name("include")


def lint(design: Design, *, root: Path = _ROOT) -> list[Finding]:
    """Check all kernels of a design.

    Args:
        design: Kernels and compute units.
        root: Folder above the kernels' sources. Their headers come from ``hls/include``; headers that replace the
            toolchain's come from ``hls/sim/include`` and, if simulation does without them, from this folder.
    """
    missing = [Finding(str(root / k.source), 1, "is missing") for k in design.kernels if not (root / k.source).exists()]
    if missing:
        return missing
    with TemporaryDirectory() as generated:
        (Path(generated) / "card_kernels.hpp").write_text(signatures.header())
        include, stand_ins = [root / "hls/include", Path(generated)], [root / "hls/sim/include", _STAND_INS]
        sources = {k: Source(root / k.source, include=include, stand_ins=stand_ins) for k in design.kernels}
    findings = {finding for kernel, source in sources.items() for finding in _check(source, kernel)}
    tops = [
        (top, sum(unit.kernel == kernel for unit in design.compute_units))
        for kernel, source in sources.items()
        for top in source.tops
    ]
    return sorted({*findings, *check_masters(tops, path=str(root / design.kernels[-1].source))})


def _check(source: Source, kernel: Kernel) -> Iterator[Finding]:
    if source.errors:
        yield from source.errors
        return
    yield from check_pragmas(source)
    yield from check_top(source, kernel)
    unsynthesisable = [finding for top in source.tops for finding in check_synthesis(source, top)]
    yield from unsynthesisable
    # Streams are followed through calls, which ends only if no function calls itself.
    if not unsynthesisable:
        for top in source.tops:
            yield from check_dataflow(source, top)
