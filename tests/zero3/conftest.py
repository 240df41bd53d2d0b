"""A failing contract test says what breaks: the rows of docs/seams.md that name it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.zero3.seams import ROOT, read_seams


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        test = f"{item.path.relative_to(ROOT / 'tests')}::{item.originalname}"
        breaks = [str(seam) for seam in read_seams() if seam.test == test]
        if breaks:
            report.sections.append(("what breaks (docs/seams.md)", "\n".join(breaks)))
    return report
