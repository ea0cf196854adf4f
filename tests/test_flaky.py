"""A failed test is run once more, in one process and in several. Two failures fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import flaky

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent

FILE = """
import pytest

runs = []

@pytest.fixture(scope="module")
def shared():
    runs.append("shared")
    return len(runs)

def test_passes():
    pass

def test_fails_once(shared):
    runs.append("run")
    assert runs == ["shared", "run", "shared", "run"], "the first of two"

def test_fails_twice(request):
    runs.append("run")
    assert False, f"run {len(runs)}"

@pytest.fixture
def opens_at_second():
    runs.append("opened")
    assert runs.count("opened") == 2, "the fixture fails once"

def test_its_fixture_fails_once(opens_at_second):
    pass

@pytest.fixture
def closes_at_second():
    yield
    runs.append("closed")
    assert runs.count("closed") == 2, "the end of the fixture fails once"

def test_its_fixture_ends_with_a_failure_once(closes_at_second):
    pass

@pytest.mark.xfail
def test_is_expected_to_fail():
    runs.append("expected")
    assert runs.count("expected") == 2

@pytest.mark.skip
def test_is_skipped():
    assert False
"""
FLAKY = ["test_fails_once", "test_its_fixture_fails_once", "test_its_fixture_ends_with_a_failure_once"]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_pass_at_the_second_run_is_named_and_two_failures_fail(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # To load the plugins of all installed packages takes longer than the run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_here=FILE)
    pytester.makeconftest('pytest_plugins = ["tests.flaky"]')
    outcome = pytester.runpytest_subprocess("-p", "xdist", "-n", processes, "-p", "no:cacheprovider")
    text = outcome.stdout.str()
    closing = [line for line in text.splitlines() if line.startswith("FLAKY ")]
    assert closing == [f"FLAKY test_here.py::{name}" for name in FLAKY], text
    assert "the first of two" in text and "the fixture fails once" in text
    assert outcome.ret == pytest.ExitCode.TESTS_FAILED
    assert outcome.parseoutcomes() == {"passed": 4, "flaky": 3, "failed": 1, "skipped": 1, "xfailed": 1}


def test_a_run_with_flaky_tests_only_passes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("runs = []\ndef test_one():\n    runs.append(1)\n    assert len(runs) == 2")
    outcome = pytester.runpytest_inprocess("-n", "0", plugins=[flaky])
    assert outcome.ret == pytest.ExitCode.OK
    assert outcome.parseoutcomes() == {"passed": 1, "flaky": 1}


def test_with_the_option_once_there_is_no_second_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("runs = []\ndef test_one():\n    runs.append(1)\n    assert len(runs) == 2")
    outcome = pytester.runpytest_inprocess("-n", "0", "--once", plugins=[flaky])
    assert outcome.ret == pytest.ExitCode.TESTS_FAILED
