"""A forecast as a picture: files that a viewer shows."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from tests.cli.forecast.days import EXTRA, NO_EXTRA, answered, asked, counted

from timeball.cli.forecast import report
from timeball.cli.forecast.report import answer
from timeball.model.errors import RequestError, SetupError

pytest.importorskip("matplotlib", reason="the extra `picture` is not installed")


def size(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_load_and_below_it_what_consumers_have_not_taken(tmp_path: Path) -> None:
    report.draw(answered(EXTRA, rates={"orders": 10, "*": 60}), tmp_path / "both.png")
    report.draw(answered(by_topic=False), tmp_path / "load.png")
    (wide, high), (_, low) = size(tmp_path / "both.png"), size(tmp_path / "load.png")
    assert wide >= 1_000 and high > low
    report.draw(answer(counted(came=90), asked(), NO_EXTRA), tmp_path / "came.svg")
    assert "came (90)" in (tmp_path / "came.svg").read_text()
    report.draw(answered(topics=["nobody"]), tmp_path / "empty.svg")
    assert "<svg" in (tmp_path / "empty.svg").read_text()


def test_more_bars_than_a_picture_holds_are_drawn_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered(by="second")
    assert report._unit(found) == "second"
    monkeypatch.setattr(report, "BARS_DRAWN_MAX", 5)
    assert report._unit(found) == "minute"


def test_of_many_corners_the_highest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CORNERS_MAX", 10)
    rows = np.zeros(95)
    rows[42] = 7.0
    at, thin = report._thin_out(np.arange(95.0), rows)
    assert len(at) == len(thin) == 10 and thin.max() == 7


def test_a_file_that_could_not_be_written_is_told_before_anything_is_counted(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--picture load\.txt: its name should end in \.png"):
        report.check_picture(Path("load.txt"))
    with pytest.raises(SetupError, match="there is no folder"):
        report.check_picture(tmp_path / "nowhere" / "load.png")
    report.check_picture(tmp_path / "load.png")
