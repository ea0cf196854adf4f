"""`timeball table`: files and sizes by bucket, and the merges that the broker makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import RunningNode, running_node

from timeball.table.merging import FILES_MIN


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A broker with an empty pending table, which compacts only on request."""
    with running_node(tmp_path_factory.mktemp("table") / "d", compact_rows=0) as running:
        yield running


def test_an_empty_table_has_no_files(node: RunningNode) -> None:
    document = json.loads(run_here("table", "--json", "--endpoint", node.endpoint).stdout)
    assert document == {
        "tables": [
            {"group": "", "version": 0, "files": 0, "rows": 0, "size_bytes": 0, "buckets": [], "merges": []}
        ]
    }


def test_the_command_shows_files_by_bucket_and_the_merge_that_the_broker_then_makes(
    node: RunningNode,
) -> None:
    with node.client() as ball:
        for number in range(FILES_MIN):
            ball.send("mail", b"m", after="1000d")
            ball.compact()
            assert ball.status()["schedule"]["table_files"] == number + 1
        result = run_here("table", "--endpoint", node.endpoint)
        assert result.returncode == 0, result.stderr
        head, bucket, total, merge = result.stdout.splitlines()
        assert head.split() == ["bucket", "files", "rows", "size"]
        assert bucket.split()[1:] == total.split()[1:]
        assert bucket.split()[1:3] == ["12", "12"]
        assert merge.startswith("the broker would merge 12 files of 20")
        assert merge.endswith("into about 1")

        broker = node.node.broker
        asyncio.run_coroutine_threadsafe(broker.mover.rewrite(), node.loop).result()
        assert ball.status()["schedule"]["table_files"] == 1
    assert "no merge is worth its cost" in run_here("table", "--endpoint", node.endpoint).stdout
