"""A test with more rounds in a siege has the marker `siege`. Without it `make siege` leaves the test out.

Checked in the sources: any use of `rounds`, or of a constant, a fixture or a function of the tests that uses it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Symbol = tuple[str, str]  # a module, and a name in it. Members of a class have a dot before it
ASKED: frozenset[Symbol] = frozenset(
    {("tests", "rounds"), ("tests.rounds", "rounds"), ("tests.rounds", "IS_SIEGE")}
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, str]:
    """Return the text of each module of the tests."""
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "tests").rglob("*.py"))
    return {".".join(path.parts): (ROOT / path).with_suffix(".py").read_text("utf-8") for path in paths}


def used(node: ast.AST) -> Iterator[str]:
    """Yield the names in a piece of code. A parameter may be a fixture."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.arg):
            yield child.arg
        elif isinstance(child, ast.Attribute):
            yield f".{child.attr}"


def defined(body: Iterable[ast.stmt], dot: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the definitions of a module by their names, and those of its classes after a dot, without tests."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from defined(statement.body, ".")
        elif isinstance(statement, Function) and not statement.name.startswith("test"):
            yield dot + statement.name, statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (
                (dot + name.lstrip("."), statement.value) for target in targets for name in used(target)
            )


def cases(
    body: Iterable[ast.stmt], *, marked: bool = False, prefix: str = ""
) -> Iterator[tuple[str, ast.AST, bool]]:
    """Yield the name and the code of each test, and whether it has the marker."""
    statements = list(body)
    marked |= any(
        isinstance(statement, ast.Assign) and "pytestmark" in used(statement) and ".siege" in used(statement)
        for statement in statements
    )
    for statement in statements:
        if not isinstance(statement, ast.ClassDef | Function):
            continue
        is_marked = marked or any(".siege" in used(decorator) for decorator in statement.decorator_list)
        if isinstance(statement, ast.ClassDef):
            yield from cases(statement.body, marked=is_marked, prefix=f"{prefix}{statement.name}::")
        elif statement.name.startswith("test"):
            yield prefix + statement.name, statement, is_marked


def _is_conftest_of(conftest: str, module: str) -> bool:
    """Check whether a module has the fixtures of this conftest."""
    return conftest.endswith(".conftest") and module.startswith(conftest.removesuffix("conftest"))


def unmarked(texts: Mapping[str, str]) -> list[str]:
    """Return the tests that have more rounds in a siege, but no marker."""
    growing, parsed = set(ASKED), dict[str, ast.Module]()
    while True:
        count_before, tests = len(growing), []
        for module, text in texts.items():
            near = {source for source, _ in growing if source == module or _is_conftest_of(source, module)}
            # A module that names none of the others is not parsed, and most modules do not.
            if (
                module not in parsed
                and not near
                and not any(f"from {source} import" in text for source, _ in growing)
            ):
                continue
            tree = parsed.setdefault(module, ast.parse(text))
            imported = [statement for statement in ast.walk(tree) if isinstance(statement, ast.ImportFrom)]
            own = {name for source, name in growing if source in near}
            # Members of classes of another module may be inherited.
            own |= {
                name
                for statement in imported
                for source, name in growing
                if source == statement.module and name[0] == "."
            }
            own |= {
                alias.asname or alias.name
                for statement in imported
                for alias in statement.names
                if (statement.module, alias.name) in growing
            }
            growing |= {(module, name) for name, code in defined(tree.body) if not own.isdisjoint(used(code))}
            tests += [
                f"{module}::{name}"
                for name, code, is_marked in cases(tree.body)
                if not is_marked and not own.isdisjoint(used(code))
            ]
        if len(growing) == count_before:
            return tests


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
    (test,) = unmarked(texts)
    assert test.startswith("tests.test_a::") and test.endswith("test_one")
    marked = {
        module: text.replace("    def test_", f"    {SIEGE}    def test_") for module, text in texts.items()
    }
    assert (
        unmarked({module: f"pytestmark = pytest.mark.siege\n{text}" for module, text in marked.items()}) == []
    )


def test_a_function_of_the_same_name_does_not_need_the_marker() -> None:
    own = "def rounds(some, every): ...\ndef test_one():\n    rounds(1, 2)\n"
    assert unmarked({"tests.test_a": own}) == []
    assert (
        unmarked({"tests.test_a": f"{ASKS}{SIEGE}def test_one():\n    rounds(1, 2)\ndef test_two(): ...\n"})
        == []
    )
