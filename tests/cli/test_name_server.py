"""`timeball name-server`."""

from __future__ import annotations

import pytest

from timeball.cli.main import main


def test_a_name_server_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["name-server"])
    assert ended.value.code == 4 and "--cluster" in capsys.readouterr().err
