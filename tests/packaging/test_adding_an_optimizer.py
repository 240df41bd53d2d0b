"""The page on adding an optimizer lists the files that RMSprop, its example, needs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lightning_smartinfinity.common.update_rules import RULES

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "examples", "hls", "lightning_smartinfinity", "tools")
# The rules themselves, and a benchmark of some golden steps.
RULE_FILES = (
    "lightning_smartinfinity/common/update_rules.py",
    "lightning_smartinfinity/pipeline/rules/",
)
RULE_OF = {name.lower(): rule.name for rule in RULES for name in (rule.name, rule.step, *rule.optimizers)}
LITERALS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
SUFFIXES = (".cpp", ".hpp", ".inl", ".py", ".txt")


def test_the_page_lists_the_files_that_name_its_example() -> None:
    """A new file that names an optimizer must be added to the page, or must derive what it needs."""
    page = (ROOT / "docs/adding_an_optimizer.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [file for file in ROOT.iterdir() if file.is_file() and file.suffix in (".txt", ".toml")]
    files += [ROOT / "Makefile", ROOT / "hls/Makefile"]
    naming = [file for file in files if "rmsprop" in f"{file.name} {file.read_text()}".lower()]
    assert sorted(listed) == sorted(str(file.relative_to(ROOT)) for file in naming)
    assert len(listed) <= 12


def lists(source: str) -> list[set[str]]:
    """Return the names of optimizers, rules and their steps in each literal of a Python source."""
    literals = (node for node in ast.walk(ast.parse(source)) if isinstance(node, LITERALS))
    kept = (node for node in literals if not isinstance(getattr(node, "ctx", None), ast.Store))
    return [RULE_OF.keys() & {_first_word(part) for part in ast.walk(node)} for node in kept]


def _first_word(node: ast.AST) -> str:
    """Return the first word of a string, a name or an attribute, in lower case."""
    said = node.value if isinstance(node, ast.Constant) else getattr(node, "attr", getattr(node, "id", ""))
    return re.split(r"[ _]", str(said).lower())[0]


@pytest.mark.parametrize(
    "source",
    [
        "('sgd', 'adagrad')",
        "[SGD, ADAGRAD]",
        "{torch.optim.SGD, torch.optim.Adagrad}",
        "{'sgd_nesterov': 1, 'SGD without momentum': 2, 'Adagrad': 3}",
        "f(['sgd', adagrad_step()])",
    ],
)
def test_a_list_is_found(source: str) -> None:
    """A list is found whichever way it names the optimizers."""
    assert {"sgd", "adagrad"} in lists(source)


def test_no_product_file_lists_optimizers() -> None:
    """A list would be incomplete once an optimizer is added: it must be derived from the rules."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    listing = {
        str(path.relative_to(ROOT)) for path in files if any(len(names) >= 2 for names in lists(path.read_text()))
    }
    assert {name for name in listing if not name.startswith(RULE_FILES)} == set()


def test_the_page_lists_the_tests_with_lists_of_their_own() -> None:
    """Files on the page name its example. A file that lists optimizers of three rules is on the page."""
    page = (ROOT / "docs/adding_an_optimizer.md").read_text()
    listed = set(re.findall(r"`(tests/[^`]+\.py)`", page))
    assert {name for name in listed if "rmsprop" not in (ROOT / name).read_text().lower()} == set()
    listing = set()
    for path in (ROOT / "tests").rglob("*.py"):
        rules = [{RULE_OF[name] for name in names} for names in lists(path.read_text())]
        if any(len(named) >= 3 for named in rules):
            listing.add(str(path.relative_to(ROOT)))
    assert {"missing": sorted(listing - listed), "without a list": sorted(listed - listing)} == {
        "missing": [],
        "without a list": [],
    }
