"""A data folder of another program, of an unknown format, or half restored is refused and not changed."""

from pathlib import Path

import pytest

from timeball.io.files import RealFiles
from timeball.model.errors import SetupError
from timeball.node.data_folder import FORMAT_NAME, RESTORING, check_folder, write_format


def test_an_empty_folder_is_accepted_and_gets_its_format_file(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    check_folder(files)
    write_format(files)
    check_folder(files)
    assert [path.name for path in tmp_path.iterdir()] == [FORMAT_NAME]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (RESTORING, "", "restore was not finished"),
        ("letter", "dear", "no Timeball data"),
        (FORMAT_NAME, "{}", "not Timeball's"),
        (FORMAT_NAME, '{"product":"other","format":1}', "belongs to 'other'"),
        (FORMAT_NAME, '{"product":"timeball","format":99}', "newer Timeball"),
    ],
)
def test_a_folder_that_is_not_ready_is_refused_with_the_reason(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SetupError, match=reason):
        check_folder(RealFiles(tmp_path))
    assert (tmp_path / name).read_text() == content
