"""`timeball backup` and `timeball restore`: what they print, and what they refuse."""

import json
from pathlib import Path

from tests.cli.in_process import run_here
from tests.node_fixture import running_node

from timeball import Timeball


def test_a_folder_in_use_is_copied_and_restored(tmp_path: Path) -> None:
    data, copy, back = tmp_path / "data", tmp_path / "copy", tmp_path / "back"
    with running_node(data) as node, Timeball(node.endpoint) as ball:
        receipt = ball.send("kept", "x", after="1h")
        made = run_here("backup", str(copy), "--data", str(data), "--json")
        assert made.returncode == 0, made.stderr
        found = json.loads(made.stdout)
        assert found["row"] > receipt.seq and found["files"] >= 2 and found["first_row"] == 1
    told = run_here("restore", str(copy), "--data", str(back))
    assert (told.returncode, "restored into" in told.stdout) == (0, True)
    with running_node(back) as node, Timeball(node.endpoint) as ball:
        assert ball.get(receipt.id).due_ms == receipt.due_ms


def test_impossible_folders_are_set_up_errors(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for arguments, word in [
        (["backup", str(tmp_path / "to"), "--data", str(tmp_path / "none")], "no such folder"),
        (["backup", str(tmp_path / "data/to"), "--data", str(tmp_path / "data")], "elsewhere"),
        (["restore", str(tmp_path / "none"), "--data", str(tmp_path / "to")], "no such folder"),
        (["restore", str(tmp_path / "data"), "--data", str(tmp_path / "to")], "no backup"),
    ]:
        refused = run_here(*arguments)
        assert refused.returncode == 4 and word in refused.stderr, refused.stderr
