"""Tests of timeball.spark.source.streams: which groups a stream reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tests.spark.two_groups import two_groups

from timeball.model.errors import SetupError, Unavailable
from timeball.spark.source.log_reader import LogStream
from timeball.spark.source.options import read_options
from timeball.spark.source.streams import check_groups_exist


def test_offset_of_a_missing_group_is_refused() -> None:
    check_groups_exist({"g1": 5}, ["g1", "g2"])
    with pytest.raises(SetupError, match="'g3', which is not there"):
        check_groups_exist({"g1": 5, "g3": 1}, ["g1", "g2"])


def test_each_query_reads_the_current_groups(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        stream = LogStream(read_options({"endpoint": groups.endpoint}))
        assert [group for group, _ in stream.statuses()] == [("g1", groups.endpoint)], "as it was named"
        groups.add()
        result = stream.statuses()
        assert [(group.name, status.group) for group, status in result] == [("g1", "g1"), ("g2", "g2")]
        assert [group.name for group in stream.groups()] == ["g1", "g2"]
        addresses = [f"127.0.0.1:{groups.one.settings.port}", "127.0.0.1:1"]
        groups.tell(groups.one, [{"group": "g1", "addresses": addresses}])
        stream.statuses()
        assert list(stream._opened) == [groups.endpoint], (
            "connections to what is not read any more are closed"
        )
        groups.tell(groups.one, None)
        with pytest.raises(Unavailable, match="has not read yet which other groups there are"):
            stream.groups()
        assert pickle.loads(pickle.dumps(stream))._opened == {}
        stream.stop()
