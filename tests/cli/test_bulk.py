"""`timeball bulk` and `timeball campaign`: input, refusals and output. tests/spark/jobs/test_bulk.py tests the job."""

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
    """Build the report of a bulk write: 30 messages due at 0:00, 70 at 1:00, and 5 rejects. `more` replaces fields."""
    load = Load(topic=np.zeros(2, np.int64), second=np.array([0, 3_600]), rows=np.array([30, 70]), width_s=60)
    fields = {
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
    return BulkReport(**{**fields, **more})


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
    fields = document(report())
    assert (fields["rows_per_s"], fields["amplification"], fields["by"]) == (200, 1.5, "minute")
    assert fields["due"] == {"1970-01-01T00:00": 30, "1970-01-01T01:00": 70}
    json.dumps(fields)


def test_the_report_of_a_dry_run_and_of_a_repeat_differ() -> None:
    dry_run = list(describe_report(report(dry_run=True, files=0, written_bytes=0, rejects_uri=None)))
    assert dry_run[-2:] == [
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
    for uris, requested in (([], None), (["/a/b.txt"], None), (["/a.csv"], Format.JDBC)):
        with pytest.raises(RequestError):
            choose_format(uris, requested)


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


def test_the_campaign_id_changes_with_each_file_and_option(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("x")

    def id_of(
        *files: str, format_: Format = Format.CSV, options: tuple[str, ...] = (), **meaning: str
    ) -> str:
        """Derive the id of a campaign. `meaning`: the mapping of the columns."""
        return campaign_id(build_source(files or [str(file)], format_, options), meaning)

    first = id_of()
    assert first == id_of()
    assert id_of(str(tmp_path / "*.csv")) == id_of(str(tmp_path / "*.csv"))
    different_ids = {
        id_of(format_=Format.JSON),
        id_of(options=("sep=;",)),
        id_of(topic="u"),
        id_of(str(tmp_path)),
    }
    pattern = id_of(str(tmp_path / "*.csv"))
    file.write_text("xy")
    different_ids |= {id_of(), pattern, id_of(str(tmp_path / "*.csv"))}
    assert len(different_ids | {first}) == 8


@pytest.mark.parametrize(
    ("arguments", "text"),
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
def test_impossible_arguments_are_refused_before_spark_starts(arguments: list[str], text: str) -> None:
    result = run_here("bulk", *arguments, "--endpoint", NO_FLIGHT, "--master", "spark://127.0.0.1:1")
    assert (result.returncode, result.stdout) == (2, "")
    assert text in result.stderr


def test_without_a_broker_a_bulk_write_ends_before_spark_starts() -> None:
    assert_says_how_to_reach_one(
        run_here("bulk", "s3://b/a.csv", "--topic", "t", "--endpoint", NO_FLIGHT, "--master", "spark://a:1"),
        NO_FLIGHT,
    )


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_csv_file_is_tried_scheduled_repeated_paused_resumed_and_cancelled(tmp_path: Path) -> None:
    """The steps of a user. The three bulk commands use two JVMs."""
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

        dry_run = run_here("bulk", str(file), *common, "--dry-run")
        assert dry_run.returncode == 1, dry_run.stderr
        assert (
            "would schedule 50 messages" in dry_run.stdout and "would be rejected: 1, due:" in dry_run.stdout
        )
        result = run_here("bulk", str(file), *common, "--json")
        assert result.returncode == 1, result.stderr
        report = json.loads(result.stdout)
        assert (report["rows"], report["rejected"], sum(report["due"].values())) == (50, 1, 50)
        assert Path(report["rejects_uri"]).is_dir()
        repeated = run_here("bulk", str(file), *common)
        assert "was scheduled before: 50 messages; nothing is changed" in repeated.stdout, repeated.stderr
        assert ball.status()["schedule"]["table_rows"] == 50

        of_campaign = [report["campaign"], "--json", "--endpoint", node.endpoint]
        assert json.loads(run_here("campaign", "pause", *of_campaign).stdout)["held"] == 50
        assert json.loads(run_here("campaign", "resume", *of_campaign).stdout)["rows"] == 50
        assert json.loads(run_here("campaign", "cancel", *of_campaign).stdout)["cancelled"] == 50


COMMANDS = ("status", "pause", "resume", "cancel")


def test_a_campaign_through_all_commands(tmp_path: Path) -> None:
    """Nothing of Spark is imported, so no Java is needed."""
    with running_node(tmp_path / "data", compact_rows=0) as node:

        def run_campaign(*arguments: str) -> str:
            result = run_here("campaign", *arguments, "--endpoint", node.endpoint)
            assert result.returncode == 0, result.stderr
            return result.stdout

        assert run_campaign("list") == "no campaigns yet: create one with timeball bulk\n"
        assert run_campaign("list", "--json") == ""
        attach(campaign_of(node), 20)
        assert run_campaign("list").startswith("spring  running  20 messages, of ")
        output = run_campaign("status", "spring").splitlines()
        assert output[:2] == [
            "spring: running, 0 % of 20 messages",
            "released 0 + cancelled 0 + waiting 20 + held 0",
        ]
        assert output[2].startswith("next at ")
        assert run_campaign("pause", "spring") == "spring: paused, 20 messages are held\n"
        assert run_campaign("pause", "spring") == "spring: was already paused, 20 messages are held\n"
        forecast = run_here("forecast", "--endpoint", node.endpoint).stdout
        assert "20 more are held by paused campaigns, and are not counted: spring" in forecast
        assert json.loads(run_campaign("list", "--json"))["state"] == "paused"
        assert "20 messages wait again, each " in run_campaign("resume", "spring", "--shift")
        assert run_campaign("resume", "spring") == "spring: nothing is held\n"
        progress = json.loads(run_campaign("status", "spring", "--json"))
        assert (progress["rows"], progress["waiting"], progress["held"]) == (20, 20, 0)
        line = "spring: 20 of 20 messages are cancelled, {} of them now; 0 were released\n"
        assert run_campaign("cancel", "spring") == line.format(20)
        assert run_campaign("cancel", "spring") == line.format(0)
        assert json.loads(run_campaign("cancel", "spring", "--json")) == {
            "campaign": "spring",
            "rows": 20,
            "newly": 0,
            "cancelled": 20,
            "released": 0,
        }


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_campaign_is_a_usage_error(tmp_path: Path, command: str) -> None:
    with running_node(tmp_path / "data") as node:
        result = run_here("campaign", command, "summer", "--endpoint", node.endpoint)
        assert (result.returncode, result.stdout) == (2, "")
        assert "no campaign 'summer'" in result.stderr
        wrong = run_here("campaign", command, "a/b", "--endpoint", node.endpoint)
        assert wrong.returncode == 2 and "campaign 'a/b'" in wrong.stderr


@pytest.mark.parametrize("command", ["list", *COMMANDS])
def test_without_a_broker_each_campaign_command_gives_advice(command: str) -> None:
    arguments = [] if command == "list" else ["spring"]
    assert_says_how_to_reach_one(
        run_here("campaign", command, *arguments, "--endpoint", NO_FLIGHT), NO_FLIGHT
    )
    assert f"timeball campaign {command}" in run_here("campaign", command, "--help").stdout


def test_campaigns_of_several_groups_are_listed_by_group_and_paused_together(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        for node in (groups.one, groups.other):
            attach(campaign_of(node), 20)
        output = run_here("campaign", "list", "--endpoint", groups.endpoint).stdout.splitlines()
        assert [line.rpartition(", ")[2] for line in output] == ["in group g1", "in group g2"]
        of_g2 = run_here("campaign", "list", "--json", "--endpoint", f"{groups.endpoint}#g2").stdout
        assert json.loads(of_g2)["rows"] == 20
        paused = run_here("campaign", "pause", "spring", "--endpoint", groups.endpoint).stdout
        assert paused == "spring: paused, 40 messages are held\n"
