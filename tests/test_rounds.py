"""A test with more rounds in a siege has the marker `siege`. Without it `make siege` leaves the test out.

Checked in the sources: any use of `rounds`, or of a constant, a fixture or a function of the tests that uses it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Symbol = tuple[str, str]  # a module, and a name in it; of what a class has, with a dot before it
ASKED: frozenset[Symbol] = frozenset(
    {("tests", "rounds"), ("tests.rounds", "rounds"), ("tests.rounds", "IS_SIEGE")}
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, str]:
    """Return the text of each module of the tests."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "tests").rglob("*.py"))
    return {".".join(path.parts): (ROOT / path).with_suffix(".py").read_text("utf-8") for path in paths}


def used(node: ast.AST) -> Iterator[str]:
    """Yield the names that stand in a piece of code; a parameter may be a fixture."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.arg):
            yield each.arg
        elif isinstance(each, ast.Attribute):
            yield f".{each.attr}"


def defined(body: Iterable[ast.stmt], dot: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield what a module defines by its names, and after a dot what its classes do; but no test."""
    for each in body:
        if isinstance(each, ast.ClassDef):
            yield from defined(each.body, ".")
        elif isinstance(each, Function) and not each.name.startswith("test"):
            yield dot + each.name, each
        elif isinstance(each, ast.Assign | ast.AnnAssign) and each.value is not None:
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from ((dot + name.lstrip("."), each.value) for target in targets for name in used(target))


def cases(
    body: Iterable[ast.stmt], *, marked: bool = False, prefix: str = ""
) -> Iterator[tuple[str, ast.AST, bool]]:
    """Yield each test: its name, its code, and whether it carries the marker."""
    statements = list(body)
    marked |= any(
        isinstance(each, ast.Assign) and "pytestmark" in used(each) and ".siege" in used(each)
        for each in statements
    )
    for each in statements:
        if not isinstance(each, ast.ClassDef | Function):
            continue
        is_marked = marked or any(".siege" in used(decorator) for decorator in each.decorator_list)
        if isinstance(each, ast.ClassDef):
            yield from cases(each.body, marked=is_marked, prefix=f"{prefix}{each.name}::")
        elif each.name.startswith("test"):
            yield prefix + each.name, each, is_marked


def _is_conftest_of(conftest: str, module: str) -> bool:
    return conftest.endswith(".conftest") and module.startswith(conftest.removesuffix("conftest"))


def unmarked(texts: Mapping[str, str]) -> list[str]:
    """Return the tests that have more rounds in a siege, and no marker."""
    growing, parsed = set(ASKED), dict[str, ast.Module]()
    while True:
        before, found = len(growing), []
        for module, text in texts.items():
            near = {of for of, _ in growing if of == module or _is_conftest_of(of, module)}
            # A module that names none of the others is not parsed: most have nothing to do with it.
            if (
                module not in parsed
                and not near
                and not any(f"from {of} import" in text for of, _ in growing)
            ):
                continue
            tree = parsed.setdefault(module, ast.parse(text))
            imported = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
            own = {name for of, name in growing if of in near}
            # What classes of another module have may be inherited.
            own |= {name for each in imported for of, name in growing if of == each.module and name[0] == "."}
            own |= {
                alias.asname or alias.name
                for each in imported
                for alias in each.names
                if (each.module, alias.name) in growing
            }
            growing |= {(module, name) for name, code in defined(tree.body) if not own.isdisjoint(used(code))}
            found += [
                f"{module}::{name}"
                for name, code, is_marked in cases(tree.body)
                if not is_marked and not own.isdisjoint(used(code))
            ]
        if len(growing) == before:
            return found


def test_rounds_that_grow_in_a_siege_are_marked() -> None:
    assert unmarked(sources()) == []


ASKS = "from tests.rounds import rounds\n"
SIEGE = "@pytest.mark.siege\n"


@pytest.mark.parametrize(
    "texts",
    [
        {"tests.test_a": f"{ASKS}def test_one():\n    rounds(1, 2)\n"},
        {"tests.test_a": f"{ASKS}@pytest.mark.parametrize('n', range(rounds(1, 2)))\ndef test_one(n): ...\n"},
        {"tests.test_a": f"{ASKS}TIMES = rounds(1, 2)\ndef test_one():\n    TIMES\n"},
        {"tests.test_a": f"{ASKS}def many():\n    return rounds(1, 2)\nasync def test_one():\n    many()\n"},
        {
            "tests.test_a": f"{ASKS}class TestA:\n    n = rounds(1, 2)\n    def test_one(self):\n        self.n\n"
        },
        {
            "tests.a": f"{ASKS}T = rounds(1, 2)\n",
            "tests.test_a": "from tests.a import T\ndef test_one():\n    T\n",
        },
        {
            "tests.conftest": f"{ASKS}def many():\n    return rounds(1, 2)\n",
            "tests.test_a": "def test_one(many): ...\n",
        },
        {"tests.test_a": "from tests.rounds import IS_SIEGE\ndef test_one():\n    assert IS_SIEGE\n"},
    ],
)
def test_a_test_without_the_marker_is_noticed(texts: dict[str, str]) -> None:
    (found,) = unmarked(texts)
    assert found.startswith("tests.test_a::") and found.endswith("test_one")
    whole = {
        module: text.replace("    def test_", f"    {SIEGE}    def test_") for module, text in texts.items()
    }
    assert (
        unmarked({module: f"pytestmark = pytest.mark.siege\n{text}" for module, text in whole.items()}) == []
    )


def test_a_name_that_is_another_s_is_not_meant() -> None:
    own = "def rounds(some, every): ...\ndef test_one():\n    rounds(1, 2)\n"
    assert unmarked({"tests.test_a": own}) == []
    assert (
        unmarked({"tests.test_a": f"{ASKS}{SIEGE}def test_one():\n    rounds(1, 2)\ndef test_two(): ...\n"})
        == []
    )
