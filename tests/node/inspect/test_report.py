"""A report holds what its selection asks for, and every flaw on the way. tests/cli/test_dump.py has the rest."""

from __future__ import annotations

import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import fill

from timeball.model.message import Kind
from timeball.node.inspect.folder import Damage, FolderDump, InspectedFrame
from timeball.node.inspect.report import Selection, describe_rows, find_rows, summarise


@pytest.fixture(scope="module")
def files() -> CrashFiles:
    """Three segments."""
    files = CrashFiles()
    fill(files, 20)
    return files


def seqs(files: CrashFiles, selection: Selection) -> list[int]:
    frames = [found for found in find_rows(FolderDump(files), selection) if isinstance(found, InspectedFrame)]
    return [row["seq"] for frame in frames for row in describe_rows(frame, selection)]


def test_a_selection_bounds_segments_numbers_and_kinds(files: CrashFiles) -> None:
    everything = seqs(files, Selection())
    assert everything == list(range(1, len(everything) + 1))
    assert seqs(files, Selection(from_seq=4, to_seq=9)) == [4, 5, 6, 7, 8]
    second = seqs(files, Selection(segments=frozenset([2])))
    assert 0 < len(second) < len(everything) and second == everything[second[0] - 1 : second[-1]]
    assert seqs(files, Selection(kinds=frozenset([int(Kind.CANCEL)]))) == []


def test_a_summary_counts_what_is_wanted(files: CrashFiles) -> None:
    whole, part = (summarise(FolderDump(files), Selection(to_seq=end)) for end in (None, 2))
    assert sum(segment.rows for segment in whole.segments) == len(seqs(files, Selection()))
    assert len(part.segments) == 1 and part.segments[0].rows < whole.segments[0].rows
    assert whole.flaws == [] and whole.document()["damage"] == []


def test_damage_is_in_every_report(files: CrashFiles) -> None:
    broken = CrashFiles()
    fill(broken, 20)
    first = FolderDump(broken).segments[0]
    file = broken.open(first.name)
    file.write_at(5_000, b"\xff" * 64)
    file.close()
    summary = summarise(FolderDump(broken), Selection())
    assert summary.damage and summary.document()["damage"][0]["file"] == first.name
    found = list(find_rows(FolderDump(broken), Selection(kinds=frozenset([int(Kind.CANCEL)]))))
    assert [type(each) for each in found] == [Damage]
