"""`timeball dump`, `backup` and `restore`: what they print, and what they refuse."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.in_process import run_here
from tests.cli.processes import client_of, serving
from tests.node_fixture import RunningNode, running_node
from tests.written_again import fill_segment, write_again

from timeball.model.config import MIB


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a broker that took messages, scheduled messages and a cancel, and was stopped."""
    folder = tmp_path_factory.mktemp("dump") / "data"
    node = running_node(folder, queues_per_topic=2, segment_bytes=MIB)  # small, because tests copy them
    with node as running, running.client() as ball:
        ball.send_many([{"topic": "orders", "body": f"{n}".encode()} for n in range(5)])
        ball.send("orders", b"\xff", after="1h", message_id="later", keys="order-17")
        ball.send("orders", b"never", after="2h", message_id="never")
        assert ball.cancel(id="never").verdict == "cancelled"
    yield folder


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which a test may change."""
    return shutil.copytree(data, tmp_path / "copy")


def state(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the hash of the content and the time of change of every file."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


def documents(folder: Path, *options: str, code: int = 0) -> list[dict[str, Any]]:
    """Run `timeball dump --json`, which must end with `code`, and return the documents that it prints."""
    result = run_here("dump", "--data", str(folder), "--json", *options)
    assert result.returncode == code, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def flip(file: Path, at: int) -> None:
    """Flip all bits of the byte at this position of a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= 0xFF
    file.write_bytes(bytes(content))


def test_the_summary_counts_all_rows_and_a_dump_changes_no_file(data: Path) -> None:
    before = state(data)
    [report] = documents(data, "--verify")
    [segment, *spares] = report["segments"]
    assert segment["kinds"] == {"META": 1, "MESSAGE": 5, "SCHEDULED": 2, "CANCEL": 1}
    assert (segment["state"], segment["rows"]) == ("active", 9)
    assert (segment["first_seq"], segment["next_seq"]) == (1, 10)
    assert all(spare["state"] == "spare" for spare in spares)
    assert (report["checkpoint"]["seq"], report["checkpoint"]["settled_rows"]) == (10, 1)
    lengths = [(queue["topic"], queue["queue_id"], queue["max_offset"]) for queue in report["queues"]]
    assert sorted(lengths) in ([("orders", 0, 3), ("orders", 1, 2)], [("orders", 0, 2), ("orders", 1, 3)])
    assert (report["damage"], report["torn"], report["verified"]) == ([], [], True)
    assert state(data) == before


def test_the_text_summary_counts_rows_queues_and_damage(data: Path) -> None:
    result = run_here("dump", "--data", str(data))
    assert result.returncode == 0
    assert "5 message, 1 meta, 2 scheduled, 1 cancel" in result.stdout
    assert "checkpoint at seq 10" in result.stdout and "topic orders: 5 in 2 queues" in result.stdout
    assert result.stdout.splitlines()[-1] == "no damage"


def test_each_frame_begins_where_the_frame_before_it_ends(data: Path) -> None:
    frames = documents(data, "--frames")
    assert sum(frame["rows"] for frame in frames) == 9
    for before, after in itertools.pairwise(frames):
        assert after["first_seq"] == before["first_seq"] + before["span"]
        assert after["position"] == before["position"] + before["length"]
    assert {frame["checksum"] for frame in frames} == {"ok"}
    result = run_here("dump", "--data", str(data), "--frames")
    assert len(result.stdout.splitlines()) == len(frames)


def test_rows_by_kind_and_range(data: Path) -> None:
    assert [row["seq"] for row in documents(data, "--rows")] == list(range(1, 10))
    later, never = documents(data, "--rows", "--kind", "scheduled")
    assert (later["unique_key"], later["keys"], later["body_base64"]) == ("later", "order-17", "/w==")
    assert (never["body"], never["kind"]) == ("never", "SCHEDULED")
    [cancel] = documents(data, "--rows", "--kind", "CANCEL", "--kind", "release")
    assert cancel["source_seq"] == never["seq"]
    assert [row["body"] for row in documents(data, "--rows", "--from-seq", "3", "--to-seq", "6")] == [
        "1",
        "2",
        "3",
    ]
    assert documents(data, "--rows", "--from-seq", "100") == []
    output = run_here("dump", "--data", str(data), "--rows", "--kind", "scheduled").stdout.splitlines()
    assert len(output) == 2 and "later" in output[0] and "due " in output[0]


def test_a_dump_shows_the_row_of_a_topic_and_hides_secrets(data: Path, tmp_path: Path) -> None:
    """Receipts of gRPC consumers depend on a secret in the log, and a user may send a dump to other people."""
    [topic] = documents(data, "--rows", "--kind", "meta")
    assert "orders" in topic["unique_key"] and topic["body"]
    folder = tmp_path / "data"
    with running_node(folder, segment_bytes=MIB) as node:
        node.run(_create_secret(node))
    secret = [row for row in documents(folder, "--rows") if row["unique_key"].startswith("secret/")]
    assert secret and all("body" not in row and "body_base64" not in row for row in secret)


async def _create_secret(node: RunningNode) -> None:
    """Create the secret of receipts, and wait until its row is on the disk."""
    node.broker.tables.receipt_secret.get()
    await node.broker.log.writer.flushed()


def test_a_scheduled_message_that_was_written_again_is_named_in_each_of_its_rows(tmp_path: Path) -> None:
    """Rows of the kind MOVED are in the log and in its caches, like rows of any other kind."""
    folder = tmp_path / "data"
    with running_node(folder, segment_bytes=MIB) as node, node.client() as ball:
        receipt = ball.send("orders", b"later", after="1d", keys="order-17")
        fill_segment(node)
        first, second = write_again(node, receipt.seq), write_again(node, receipt.seq)
        assert ball.cancel(key="order-17")[0].verdict == "cancelled"  # makes the runs of keys
    [report] = documents(folder, "--verify")
    assert sum(segment["kinds"].get("MOVED", 0) for segment in report["segments"]) == 2
    assert report["damage"] == []
    moved = documents(folder, "--rows", "--kind", "moved")
    assert [row["seq"] for row in moved] == [*first, *second]
    for row in moved:
        fields = (row["source_seq"], row["due_ms"], row["accepted_ms"], row["body"])
        assert fields == (receipt.seq, receipt.due_ms, receipt.store_ms, "later")
    output = run_here("dump", "--data", str(folder), "--rows", "--kind", "moved").stdout.splitlines()
    assert all("MOVED" in line and f"source_seq {receipt.seq}" in line for line in output)


def test_a_dump_beside_a_running_broker_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with serving(folder) as ready, client_of(ready) as ball:
        for n in range(3):
            receipt = ball.send("orders", f"{n}".encode())
            assert [row["seq"] for row in documents(folder, "--rows")][-1] == receipt.seq
        assert documents(folder, "--verify")[0]["damage"] == []
        assert ball.send("orders", b"still here").seq == receipt.seq + 1


def test_damage_is_reported_with_its_position_and_exit_code_5(copy: Path) -> None:
    first, second, *_ = documents(copy, "--frames")
    flip(copy / "log/0000000001.log", first["position"] + 100)
    before = state(copy)
    [report] = documents(copy, code=5)
    [damage] = report["damage"]
    assert (damage["file"], damage["position"]) == ("log/0000000001.log", first["position"])
    rows = documents(copy, "--rows", code=5)
    assert "damage" in rows[0] and rows[1]["seq"] == second["first_seq"], "the rows after the damage are read"
    result = run_here("dump", "--data", str(copy))
    assert result.returncode == 5
    assert "DAMAGE: log/0000000001.log, byte 64" in result.stdout and "1 damaged place" in result.stdout
    assert run_here("dump", "--data", str(copy), "--frames").stdout.startswith("DAMAGE: ")
    assert state(copy) == before, "a dump repairs nothing"


def test_a_torn_tail_is_reported_but_is_no_damage(copy: Path) -> None:
    *_, last = documents(copy, "--frames")
    flip(copy / "log/0000000001.log", last["position"] + 100)
    (copy / "checkpoint").unlink()  # which contains that this commit was acknowledged
    [report] = documents(copy)
    assert [torn["position"] for torn in report["torn"]] == [last["position"]]
    assert "torn tail: log/0000000001.log" in run_here("dump", "--data", str(copy)).stdout


def test_a_cache_that_contradicts_the_log_is_found_only_with_verify(copy: Path) -> None:
    queue = next(copy.glob("queues/*.cq"))
    flip(queue, queue.stat().st_size - 13)
    assert documents(copy)[0]["damage"] == []
    [report] = documents(copy, "--verify", code=5)
    assert report["damage"][0]["file"] == str(queue.relative_to(copy))
    assert "1 damaged place" in run_here("dump", "--data", str(copy), "--verify").stdout


def test_option_segment_selects_one_segment_and_refuses_a_missing_one(copy: Path) -> None:
    assert [s["file"] for s in documents(copy, "--segment", "1")[0]["segments"]] == ["log/0000000001.log"]
    result = run_here("dump", "--data", str(copy), "--segment", "99")
    assert result.returncode == 2 and "--segment 99" in result.stderr


def test_a_folder_without_timeball_data_is_refused_and_not_changed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "novel.txt").write_text("chapter one")
    for folder in (foreign, tmp_path / "nowhere", foreign / "novel.txt"):
        result = run_here("dump", "--data", str(folder))
        assert result.returncode == 4 and str(folder) in result.stderr
        assert "Traceback" not in result.stderr
    # Nothing was created in the folders.
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["foreign", "novel.txt"]


def test_a_newer_format_is_refused(copy: Path) -> None:
    facts = json.loads((copy / "FORMAT").read_text())
    (copy / "FORMAT").write_text(json.dumps({**facts, "format": facts["format"] + 1}))
    result = run_here("dump", "--data", str(copy))
    assert result.returncode == 4 and "newer" in result.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--frames", "--rows"], "--frames or --rows"),
        (["--kind", "wish"], "--kind wish"),
        (["--verify", "--from-seq", "3"], "--verify"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_contradictory_options_and_an_unknown_kind_are_refused(
    data: Path, options: list[str], named: str
) -> None:
    result = run_here("dump", "--data", str(data), *options)
    assert result.returncode == 2 and named in result.stderr


def test_a_folder_in_use_is_copied_and_restored(tmp_path: Path) -> None:
    data, copy, restored_folder = tmp_path / "data", tmp_path / "copy", tmp_path / "restored_folder"
    with running_node(data) as node, node.client() as ball:
        receipt = ball.send("kept", "x", after="1h")
        backed_up = run_here("backup", str(copy), "--data", str(data), "--json")
        assert backed_up.returncode == 0, backed_up.stderr
        document = json.loads(backed_up.stdout)
        assert document["row"] > receipt.seq and document["files"] >= 2 and document["first_row"] == 1
    restored = run_here("restore", str(copy), "--data", str(restored_folder))
    assert (restored.returncode, "restored into" in restored.stdout) == (0, True)
    with running_node(restored_folder) as node, node.client() as ball:
        assert ball.get(receipt.id).due_ms == receipt.due_ms


def test_a_missing_nested_or_foreign_folder_is_a_set_up_error(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for arguments, word in [
        (["backup", str(tmp_path / "to"), "--data", str(tmp_path / "none")], "no such folder"),
        (["backup", str(tmp_path / "data/to"), "--data", str(tmp_path / "data")], "elsewhere"),
        (["restore", str(tmp_path / "none"), "--data", str(tmp_path / "to")], "no such folder"),
        (["restore", str(tmp_path / "data"), "--data", str(tmp_path / "to")], "no backup"),
    ]:
        result = run_here(*arguments)
        assert result.returncode == 4 and word in result.stderr, result.stderr
