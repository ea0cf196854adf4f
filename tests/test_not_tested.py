"""What cannot be had here is named in the closing lines, in whichever process its test was skipped."""

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
def test_who_is_missing_is_said(
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
    said = "NOT TESTED: tin can: there is no tin can here" in outcome.stdout.str()
    assert said == named
