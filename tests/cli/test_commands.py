"""Which modules a command imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_smartinfinity.cli import main
from tests.helpers.fresh_python import fresh_python

RUNS = """
    import sys
    from contextlib import suppress
    from lightning_smartinfinity.cli import main

    for command in sys.argv[1:]:
        with suppress(SystemExit):
            main([command, "--help"])
    machine = ["--gpu-memory", "none", "--host-memory", "8GB", "--disk", "1TB", "--cores", "2"]
    assert main(["plan", "7B", *machine]) in (0, 3)
    print(*sys.modules)
"""


def test_simulations_are_imported_by_their_own_command_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No other command imports ``simulate`` or the paper's machine, and a plan runs without them."""
    with pytest.raises(SystemExit):
        main(["--help"])
    others = set(re.findall(r"^    ([a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"simulate"}
    assert {"plan", "jobs", "selftest", "card-report"} < others
    imported = fresh_python(RUNS, *others, cwd=tmp_path).split()
    assert "lightning_smartinfinity.cli.plan" in imported
    assert not [name for name in imported if ".cli.simulation" in name or ".planning.paper" in name]
