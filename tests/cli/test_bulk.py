"""`timeball bulk`: input, refusals and output. tests/spark/jobs/test_bulk.py tests the job itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.cli.in_process import run_here
from tests.cli.unreachable import NO_FLIGHT, assert_says_how_to_reach_one
from tests.node_fixture import running_node
from tests.spark.campaigning import attach, campaign_of
from tests.spark.two_groups import two_groups

from timeball.cli.bulk import (
    Format,
    absolute_uri,
    build_source,
    campaign_id,
    choose_format,
    describe_report,
    document,
)
from timeball.model.errors import NotFound, RequestError
from timeball.model.limits import DAY_MS
from timeball.spark.jobs.bulk import BulkReport
from timeball.spark.views.due_histogram import Load

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")


def report(**more: object) -> BulkReport:
    load = Load(topic=np.zeros(2, np.int64), second=np.array([0, 3_600]), rows=np.array([30, 70]), width_s=60)
    given = {
        "campaign": "spring",
        "dry_run": False,
        "repeated": False,
        "rows": 100,
        "rejected": 5,
        "reasons": {"body: missing": 5},
        "rejects_uri": "/data/rejects",
        "payload_bytes": 2_000,
        "written_bytes": 3_000,
        "files": 2,
        "seconds": 0.5,
        "load": load,
    }
    return BulkReport(**{**given, **more})


def test_a_report_for_people_and_for_programs() -> None:
    lines = list(describe_report(report()))
    assert lines[0].startswith("1970-01-01T00:00") and lines[0].endswith(" 30")
    assert lines[2:4] == [
        "peak: 70 in the minute of 1970-01-01T01:00:00.000Z",
        "peak: 30 in the minute of 1970-01-01T00:00:00.000Z",
    ]
    assert lines[4:] == [
        "rejected: 5, body: missing",
        "rejects are in /data/rejects",
        "scheduled 100 messages in 0.5 s (200/s), 2.9 KiB in 2 files, 1.50 bytes a byte of payload",
        "campaign spring",
    ]
    told = document(report())
    assert (told["rows_per_s"], told["amplification"], told["by"]) == (200, 1.5, "minute")
    assert told["due"] == {"1970-01-01T00:00": 30, "1970-01-01T01:00": 70}
    json.dumps(told)


def test_a_dry_run_and_a_repeat_say_so() -> None:
    dry = list(describe_report(report(dry_run=True, files=0, written_bytes=0, rejects_uri=None)))
    assert dry[-2:] == [
        "would be rejected: 5, body: missing",
        "would schedule 100 messages, 2.0 KiB of payload",
    ]
    assert list(describe_report(report(repeated=True))) == [
        "campaign spring was scheduled before: 100 messages; nothing is changed"
    ]


def test_the_format_follows_from_the_file_name_or_is_refused(tmp_path: Path) -> None:
    assert choose_format(["/a/b.parquet", "/c.csv"], None) is Format.PARQUET
    assert choose_format(["/a/*.CSV.gz"], None) is Format.CSV
    assert choose_format(["/a/b.txt"], Format.JSON) is Format.JSON
    (tmp_path / "part-0.jsonl").write_text("{}")
    assert choose_format([str(tmp_path)], None) is Format.JSON
    for places, wanted in (([], None), (["/a/b.txt"], None), (["/a.csv"], Format.JDBC)):
        with pytest.raises(RequestError):
            choose_format(places, wanted)


def test_a_relative_path_becomes_absolute_and_a_uri_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").touch()
    assert absolute_uri("a.csv") == str(tmp_path / "a.csv")
    assert absolute_uri("*.csv") == str(tmp_path / "*.csv")
    assert absolute_uri("s3://bucket/a.csv") == "s3://bucket/a.csv"
    with pytest.raises(NotFound, match=r"b\.csv: no such file"):
        absolute_uri("b.csv")


def test_the_same_files_and_options_are_the_same_campaign(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("x")

    def id_of(
        *files: str, format_: Format = Format.CSV, options: tuple[str, ...] = (), **meaning: str
    ) -> str:
        return campaign_id(build_source(files or [str(file)], format_, options), meaning)

    first = id_of()
    assert first == id_of()
    assert id_of(str(tmp_path / "*.csv")) == id_of(str(tmp_path / "*.csv"))
    others = {id_of(format_=Format.JSON), id_of(options=("sep=;",)), id_of(topic="u"), id_of(str(tmp_path))}
    pattern = id_of(str(tmp_path / "*.csv"))
    file.write_text("xy")
    others |= {id_of(), pattern, id_of(str(tmp_path / "*.csv"))}
    assert len(others | {first}) == 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["a.csv", "--topic", "t"], "a.csv: no such file or folder"),
        (["s3://b/a.csv"], "exactly one of --topic and --topic-column"),
        (["s3://b/a.csv", "--topic", "t", "--topic-column", "c"], "exactly one of --topic"),
        (["s3://b/a", "--topic", "t"], "add --format"),
        (["--topic", "t"], "name a file, or --format jdbc"),
        (
            ["s3://b/a.csv", "--topic", "t", "--body-json", "--body-column", "b"],
            "--body-column and --body-json",
        ),
        (["s3://b/a.csv", "--topic", "t", "--option", "sep"], "--option sep: write NAME=VALUE"),
        (["--format", "jdbc", "--topic", "t", "--option", "url=x"], "name the campaign with --campaign"),
        (["s3://b/a.csv", "--topic", "t", "--conf", "=1"], "--conf =1: write NAME=VALUE"),
    ],
)
def test_impossible_arguments_are_refused_before_spark_starts(arguments: list[str], named: str) -> None:
    refused = run_here("bulk", *arguments, "--endpoint", NO_FLIGHT, "--master", "spark://127.0.0.1:1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert named in refused.stderr


def test_without_a_broker_a_load_ends_before_spark_starts() -> None:
    assert_says_how_to_reach_one(
        run_here("bulk", "s3://b/a.csv", "--topic", "t", "--endpoint", NO_FLIGHT, "--master", "spark://a:1"),
        NO_FLIGHT,
    )


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_csv_file_from_its_dry_run_to_its_cancel(tmp_path: Path) -> None:
    """The steps of a user: dry run, schedule, repeat, status, pause, resume, cancel. Three bulks use two JVMs."""
    with running_node(tmp_path / "data", compact_rows=0) as node, node.client() as ball:
        due_ms = ball.status()["now_ms"] // DAY_MS * DAY_MS + 30 * DAY_MS
        days = np.datetime_as_string(
            np.datetime64(due_ms, "ms") + np.arange(50) * np.timedelta64(1, "m"), "s"
        )
        lines = [f"{day},customer {n},{n}" for n, day in enumerate(days)]
        file = tmp_path / "people.csv"
        file.write_text("\n".join(["when,who,number", *lines, "someday,nobody,0"]) + "\n")
        common = ["--topic", "mail", "--due-column", "when", "--body-json", "--zone", "UTC", "--key-column"]
        common += ["number", "--endpoint", node.endpoint]

        dry = run_here("bulk", str(file), *common, "--dry-run")
        assert dry.returncode == 1, dry.stderr
        assert "would schedule 50 messages" in dry.stdout and "would be rejected: 1, due:" in dry.stdout
        done = run_here("bulk", str(file), *common, "--json")
        assert done.returncode == 1, done.stderr
        told = json.loads(done.stdout)
        assert (told["rows"], told["rejected"], sum(told["due"].values())) == (50, 1, 50)
        assert Path(told["rejects_uri"]).is_dir()
        again = run_here("bulk", str(file), *common)
        assert "was scheduled before: 50 messages; nothing is changed" in again.stdout, again.stderr
        assert ball.status()["schedule"]["table_rows"] == 50

        ours = [told["campaign"], "--json", "--endpoint", node.endpoint]
        assert json.loads(run_here("campaign", "pause", *ours).stdout)["held"] == 50
        assert json.loads(run_here("campaign", "resume", *ours).stdout)["rows"] == 50
        assert json.loads(run_here("campaign", "cancel", *ours).stdout)["cancelled"] == 50


COMMANDS = ("status", "pause", "resume", "cancel")


def test_a_campaign_through_all_commands(tmp_path: Path) -> None:
    """Without Java: nothing of Spark is imported."""
    with running_node(tmp_path / "data", compact_rows=0) as node:

        def say(*arguments: str) -> str:
            done = run_here("campaign", *arguments, "--endpoint", node.endpoint)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert say("list") == "no campaigns yet: create one with timeball bulk\n"
        assert say("list", "--json") == ""
        attach(campaign_of(node), 20)
        assert say("list").startswith("spring  running  20 messages, of ")
        shown = say("status", "spring").splitlines()
        assert shown[:2] == [
            "spring: running, 0 % of 20 messages",
            "released 0 + cancelled 0 + waiting 20 + held 0",
        ]
        assert shown[2].startswith("next at ")
        assert say("pause", "spring") == "spring: paused, 20 messages are held\n"
        assert say("pause", "spring") == "spring: was already paused, 20 messages are held\n"
        forecast = run_here("forecast", "--endpoint", node.endpoint).stdout
        assert "20 more are held by paused campaigns, and are not counted: spring" in forecast
        assert json.loads(say("list", "--json"))["state"] == "paused"
        assert "20 messages wait again, each " in say("resume", "spring", "--shift")
        assert say("resume", "spring") == "spring: nothing is held\n"
        progress = json.loads(say("status", "spring", "--json"))
        assert (progress["rows"], progress["waiting"], progress["held"]) == (20, 20, 0)
        ended = "spring: 20 of 20 messages are cancelled, {} of them now; 0 were released\n"
        assert say("cancel", "spring") == ended.format(20)
        assert say("cancel", "spring") == ended.format(0)
        assert json.loads(say("cancel", "spring", "--json")) == {
            "campaign": "spring",
            "rows": 20,
            "newly": 0,
            "cancelled": 20,
            "released": 0,
        }


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_campaign_is_a_usage_error(tmp_path: Path, command: str) -> None:
    with running_node(tmp_path / "data") as node:
        refused = run_here("campaign", command, "summer", "--endpoint", node.endpoint)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "no campaign 'summer'" in refused.stderr
        wrong = run_here("campaign", command, "a/b", "--endpoint", node.endpoint)
        assert wrong.returncode == 2 and "campaign 'a/b'" in wrong.stderr


@pytest.mark.parametrize("command", ["list", *COMMANDS])
def test_without_a_broker_each_campaign_command_gives_advice(command: str) -> None:
    arguments = [] if command == "list" else ["spring"]
    assert_says_how_to_reach_one(
        run_here("campaign", command, *arguments, "--endpoint", NO_FLIGHT), NO_FLIGHT
    )
    assert f"timeball campaign {command}" in run_here("campaign", command, "--help").stdout


def test_a_list_names_the_groups(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        for node in (groups.one, groups.other):
            attach(campaign_of(node), 20)
        shown = run_here("campaign", "list", "--endpoint", groups.endpoint).stdout.splitlines()
        assert [line.rpartition(", ")[2] for line in shown] == ["in group g1", "in group g2"]
        listed = run_here("campaign", "list", "--json", "--endpoint", f"{groups.endpoint}#g2").stdout
        assert json.loads(listed)["rows"] == 20
        paused = run_here("campaign", "pause", "spring", "--endpoint", groups.endpoint).stdout
        assert paused == "spring: paused, 40 messages are held\n"
