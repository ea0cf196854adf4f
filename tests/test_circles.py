"""No import cycles between files: a module can be read, moved and tested without its importers.

All imports count, also those under `TYPE_CHECKING` and inside functions, which hide a cycle from Python but not
from the reader. import-linter checks the direction between packages (pyproject.toml), this the files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"

Graph = Mapping[str, set[str]]


def module_files(src: Path) -> dict[str, Path]:
    """Return each module's file by its dotted name; a package is its `__init__.py`."""
    files = {}
    for path in src.rglob("*.py"):
        parts = path.relative_to(src).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every import in a source text, at any place in the text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import: the linter of the layers asks for whole names"
            yield from ((node.module or "", alias.name) for alias in node.names)


def import_graph(sources: Mapping[str, str]) -> Graph:
    """Return the modules that each of them imports. A name of a package is its module, if there is one."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = {f"{package}.{name}" if f"{package}.{name}" in sources else package
                 for package, name in imported(source)}  # fmt: skip
        graph[module] = (names & sources.keys()) - {module}
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """Return all that `start` imports, directly or through others."""
    modules: set[str] = set()
    stack = [start]
    while stack:
        new = graph[stack.pop()] - modules
        modules |= new
        stack += new
    return modules


def circles(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one module."""
    reach = {module: reachable(graph, module) for module in graph}
    components = {
        tuple(sorted(module for module in reach[start] if start in reach[module])) for start in graph
    }
    return [list(circle) for circle in sorted(components) if len(circle) > 1]


def test_no_module_imports_itself_through_others() -> None:
    graph = import_graph({name: path.read_text("utf-8") for name, path in module_files(SRC).items()})
    assert len(graph) > 200 and sum(map(len, graph.values())) > 1_000, "the graph is not that of the package"
    cycles = circles(graph)
    assert not cycles, "modules that import each other:\n" + "\n".join(" ".join(circle) for circle in cycles)


# ---- controls ---------------------------------------------------------------------------------------------

STRAIGHT = {
    "p": "from p.a import x",
    "p.a": "import p.b\nfrom p import c",
    "p.b": "import os, p.c",
    "p.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os",
}


def test_imports_without_a_cycle_pass() -> None:
    assert not circles(import_graph(STRAIGHT))


def test_a_circle_is_noticed() -> None:
    by_checking = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import x"
    in_a_function = "def late():\n    from p import b"
    for back in (by_checking, in_a_function, "import p.a", "class A:\n    import p.b as b"):
        (circle,) = circles(import_graph(STRAIGHT | {"p.c": back}))
        assert "p.c" in circle, back
