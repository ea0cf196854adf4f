"""`CONTROLS.md` and the code name the same negative controls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.controls import CONTROLS, WRONG

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"_(is|are|be)_(noticed|caught)$|_would_notice_|_(sees|notices)_")
MENTIONED = re.compile(r'(#|""").*\bcontrols?\b', re.IGNORECASE)

# Tests that are named like controls, and the reason why they are none.
NO_CONTROLS = {
    "tests/io/test_security.py::test_status_counts_refused_requests": "a feature of the broker",
    "tests/spark/source/test_log_reader.py::test_a_query_sees_every_row_once_over_a_restart": "a stream",
    "tests/spark/source/test_queue_reader.py::test_a_query_sees_every_row_once_over_a_restart": "a stream",
}


def looks_like_a_control(name: str, text: str) -> bool:
    """Check whether a test's name or text is that of a control."""
    return bool(NAMED.search(name) or MENTIONED.search(text))


def functions() -> Iterator[tuple[str, str, str]]:
    """Yield the id of pytest, the name and the text of each test function."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        page = path.read_text("utf-8")
        lines = page.splitlines()
        for node in ast.parse(page).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                file = path.relative_to(ROOT).as_posix()
                yield f"{file}::{node.name}", node.name, "\n".join(lines[node.lineno : node.end_lineno])


def test_the_list_names_the_controls_of_the_code() -> None:
    tests = {test: looks_like_a_control(name, text) for test, name, text in functions()}
    assert not CONTROLS - tests.keys(), f"listed, but missing: {sorted(CONTROLS - tests.keys())}"
    controls = {test for test, is_control in tests.items() if is_control and test not in NO_CONTROLS}
    missing = sorted(test.removeprefix("tests/") for test in controls - CONTROLS)
    assert not missing, f"a line each in tests/CONTROLS.md: {missing}"


def wrong_parts() -> set[str]:
    """Return the classes of schedule/wrong.py (their own parts have no docstring), and those that others list."""
    page = ast.parse((ROOT / "tests/schedule/wrong.py").read_text("utf-8"))
    classes = {node.name for node in page.body if isinstance(node, ast.ClassDef) and ast.get_docstring(node)}
    for path in (ROOT / "tests/schedule").rglob("test_*.py"):
        for listed in re.findall(
            r'(?:^WRONG = |"wrong", )\[([\w\s,]+)\]', path.read_text("utf-8"), re.MULTILINE
        ):
            classes |= set(re.findall(r"\w+", listed))
    return classes


def test_the_list_names_all_classes_that_are_wrong_on_purpose() -> None:
    assert wrong_parts() == WRONG


def test_marked_tests_are_the_listed_controls(request: pytest.FixtureRequest) -> None:
    # xdist has added the group of a test, after an @.
    assert all(
        (item.get_closest_marker("control") is not None) == (re.split(r"[\[@]", item.nodeid)[0] in CONTROLS)
        for item in request.session.items
    )


def test_a_control_that_is_not_listed_is_noticed() -> None:
    assert looks_like_a_control("test_a_wrong_row_is_noticed", "    assert 1\n")
    assert looks_like_a_control("test_rows", "    # The control: another row.\n")
    assert not looks_like_a_control("test_rows", "    controls = 1\n")
