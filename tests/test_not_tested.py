"""Missing programs are named at the end of a run, also if another process has skipped their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytest_plugins = ["pytester"]
SKIPS = 'import pytest\ndef test_one():\n    pytest.skip("tin can: there is no tin can here")\n'


@pytest.mark.parametrize("processes", ["0", "1"])
@pytest.mark.parametrize(
    ("folder", "named"), [("tests/interop", True), ("tests/dashboard", True), ("tests/x", False)]
)
def test_missing_programs_are_named_at_the_end(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: str, folder: str, named: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # To load the plugins of all installed packages takes longer than the run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    room = pytester.mkdir("tests") / folder.partition("/")[2]
    room.mkdir()
    (room / "test_here.py").write_text(SKIPS)
    pytester.makeconftest('pytest_plugins = ["tests.not_tested"]')
    outcome = pytester.runpytest_subprocess(
        "-p", "xdist", "-n", processes, "-p", "no:cacheprovider", "--rootdir", "."
    )
    assert outcome.parseoutcomes()["skipped"] == 1
    is_named = "NOT TESTED: tin can: there is no tin can here" in outcome.stdout.str()
    assert is_named == named
