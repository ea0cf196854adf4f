"""The commands for messages (send, schedule, get, pull, cancel, reschedule) against a real broker."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import typer
from tests.cli.in_process import run_here
from tests.cli.processes import COMMAND, http_endpoint_of, running
from tests.cli.small_disk import on_small_disk
from tests.cli.unreachable import NOWHERE, assert_says_how_to_reach_one

from timeball import Timeball
from timeball.cli.messages import SENTENCES, parse_due, report_ends, sentence
from timeball.cli.options import show_wait
from timeball.cli.output import ExitCode
from timeball.model.answers import VERDICTS, Verdict
from timeball.model.errors import RequestError
from timeball.model.limits import HOUR_MS


def _json(*arguments: str, text: str = "") -> list[dict[str, object]]:
    """Run a command with --json, which must write nothing to stderr. Returns its documents."""
    result = run_here(*arguments, "--json", text=text)
    assert result.stderr == ""
    return [json.loads(line) for line in result.stdout.splitlines()]


def _pull_until(endpoint: str, topic: str, count: int) -> list[dict[str, object]]:
    """Pull until `count` messages have come. Each pull waits for its first message, so this ends."""
    found: list[dict[str, object]] = []
    for _ in range(count):
        found += _json("pull", topic, "--wait", "20s", "--max", "100", "--endpoint", endpoint)
        if len(found) >= count:
            break
    return found


def test_a_pull_returns_all_fields_of_a_sent_message_once(endpoint: str) -> None:
    """A second pull of the group has nothing new."""
    options = ["--tag", "paid", "--keys", "order-17", "--keys", "anna", "--property", "region=eu"]
    sent = run_here("send", "whole", "order 17 was paid", *options, "--endpoint", endpoint)
    assert sent.returncode == 0
    [message] = _json("pull", "whole", "--endpoint", endpoint)
    assert message["id"] == sent.stdout.strip()
    assert (message["body"], message["tag"]) == ("order 17 was paid", "paid")
    assert message["keys"] == ["order-17", "anna"]
    assert message["properties"] == {"region": "eu"}
    assert message["due_ms"] is None
    assert _json("pull", "whole", "--endpoint", endpoint) == []


def test_a_peek_does_not_move_the_position_of_the_group(endpoint: str, flight: str) -> None:
    """Two peeks and then a pull return the same message."""
    run_here("send", "peeked", "x", "--endpoint", endpoint)
    for more in (["--peek", "--flight", flight], ["--peek", "--flight", flight], []):
        assert [m["body"] for m in _json("pull", "peeked", *more, "--endpoint", endpoint)] == ["x"]


def test_a_body_is_read_from_stdin(endpoint: str) -> None:
    """The message has the id that --id names."""
    sent = run_here("send", "piped", "--id", "piped-1", "--endpoint", endpoint, text="from a pipe")
    assert sent.returncode == 0
    [message] = _json("pull", "piped", "--endpoint", endpoint)
    assert (message["body"], message["id"]) == ("from a pipe", "piped-1")


def test_every_line_of_a_file_is_a_message(endpoint: str, tmp_path: Path) -> None:
    """Each message has the options of the command. The last line needs no newline."""
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\nthree")
    assert _json("send", "lines", "--lines", str(file), "--tag", "t", "--endpoint", endpoint) == [{"sent": 3}]
    messages = _pull_until(endpoint, "lines", 3)
    assert sorted((message["body"], message["tag"]) for message in messages) == [
        ("one", "t"),
        ("three", "t"),
        ("two", "t"),
    ]


def test_a_scheduled_message_comes_when_it_is_due_and_not_before(endpoint: str) -> None:
    """The lateness in the output counts from the due time to the release."""
    [receipt] = _json("schedule", "later", "x", "--after", "300ms", "--endpoint", endpoint)
    assert receipt["due_ms"] == receipt["store_ms"] + 300  # type: ignore[operator]
    [message] = _pull_until(endpoint, "later", 1)
    assert message["due_ms"] == receipt["due_ms"]
    assert message["id"] == receipt["id"]
    assert message["lateness_ms"] >= 0  # type: ignore[operator]


def test_a_message_with_a_past_due_time_is_released_at_once_with_a_note(endpoint: str) -> None:
    """The receipt has the past time, and says how long ago it was."""
    [receipt] = _json("schedule", "past", "x", "--at", "2020-01-01T00:00:00Z", "--endpoint", endpoint)
    assert receipt["due_ms"] == 1_577_836_800_000
    assert receipt["past_ms"] == receipt["store_ms"] - receipt["due_ms"]  # type: ignore[operator]
    result = run_here("schedule", "past", "x", "--at", "2020-01-01T00:00:00Z", "--endpoint", endpoint)
    assert "the due time was in the past: 2020-01-01T00:00:00" in result.stderr
    messages = _pull_until(endpoint, "past", 2)
    assert len(messages) == 2 and all(message["lateness_ms"] < HOUR_MS for message in messages)  # type: ignore[operator]


def test_the_due_time_is_on_stderr_and_only_the_id_on_stdout(endpoint: str) -> None:
    """Because of this, `timeball schedule … | xargs timeball cancel` works."""
    result = run_here("schedule", "told", "x", "--after", "1h", "--endpoint", endpoint)
    assert len(result.stdout.split()) == 1
    assert "due " in result.stderr and "1 h 0 min" in result.stderr


def test_a_cancel_prints_a_verdict_for_each_message_and_its_exit_code_covers_all(endpoint: str) -> None:
    """The code is 0 if none of the messages will be delivered, and 1 if a message is unknown."""
    ids = [
        run_here(
            "schedule", "off", "x", "--after", "1h", "--keys", "k", "--endpoint", endpoint
        ).stdout.strip()
        for _ in range(3)
    ]
    first = run_here("cancel", ids[0], "--json", "--endpoint", endpoint)
    assert first.returncode == 0
    assert json.loads(first.stdout)["verdict"] == "cancelled"
    by_key = run_here("cancel", "--key", "k", "--json", "--endpoint", endpoint)
    verdicts = [json.loads(line)["verdict"] for line in by_key.stdout.splitlines()]
    assert sorted(verdicts) == ["already_cancelled", "cancelled", "cancelled"]
    assert by_key.returncode == 0
    unknown = run_here("cancel", ids[1], "nobody-knows-this", "--endpoint", endpoint)
    assert unknown.returncode == 1
    assert "no such scheduled message" in unknown.stdout


def test_a_unique_key_has_one_pending_message(endpoint: str) -> None:
    keyed = ("schedule", "unique", "x", "--after", "1h", "--unique-key", "order-17", "--endpoint", endpoint)
    first = run_here(*keyed).stdout.strip()
    rejected = run_here(*keyed)
    assert rejected.returncode != 0 and first in rejected.stderr
    result = run_here(*keyed, "--on-pending", "keep")
    assert result.stdout.strip() == first and "was pending before" in result.stderr
    replaced = run_here(*keyed, "--on-pending", "replace")
    assert f"replaced {first}" in replaced.stderr
    assert run_here("schedule", "u", "--lines", "-", "--after", "1h", "--unique-key", "a").returncode == 2


def test_a_message_may_expire_and_have_a_window(endpoint: str) -> None:
    options = ("--expires-in", "5m", "--on-expiry", "move", "--window", "10m", "--spread", "level")
    [receipt] = _json("schedule", "options", "x", "--after", "1h", *options, "--endpoint", endpoint)
    wait_ms = int(str(receipt["due_ms"])) - int(str(receipt["store_ms"]))
    # The due time is up to 10 min after the hour, with a second of tolerance for rounding.
    assert 3_600_000 <= wait_ms + 1_000 <= 4_201_000
    [output] = _json("get", str(receipt["id"]), "--endpoint", endpoint)
    assert "TIMEBALL_EXPIRES_AFTER_MS" in json.dumps(output)
    for wrong_options in (("--lines", "-", "--expires-in", "5m"), ("--lines", "-", "--window", "5m")):
        result = run_here("schedule", "options", "--after", "1h", *wrong_options, "--endpoint", endpoint)
        assert result.returncode == 2


def test_a_cancel_that_comes_too_late_says_when_it_was_released(endpoint: str) -> None:
    """The verdict has the time of the release, and the exit code is 1."""
    [receipt] = _json("schedule", "gone", "x", "--after", "1ms", "--endpoint", endpoint)
    [message] = _pull_until(endpoint, "gone", 1)
    result = run_here("cancel", str(receipt["id"]), "--json", "--endpoint", endpoint)
    verdict = json.loads(result.stdout)
    assert (verdict["verdict"], verdict["at_ms"]) == ("released", message["store_ms"])
    assert result.returncode == 1


@pytest.mark.parametrize("after", ["4000d", "-1s"])
def test_a_too_long_or_negative_delay_is_refused_and_nothing_is_sent(endpoint: str, after: str) -> None:
    """An invalid delay never counts as no delay."""
    result = run_here("schedule", "never", "x", f"--after={after}", "--endpoint", endpoint)
    assert result.returncode == 2
    assert run_here("pull", "never", "--json", "--endpoint", endpoint).stdout == ""


def test_status_shows_the_same_process_as_json_and_as_a_table(endpoint: str) -> None:
    [found] = _json("status", "--endpoint", endpoint)
    assert found["pid"] and found["version"]
    result = run_here("status", "--endpoint", endpoint)
    assert result.returncode == 0
    assert f"pid {found['pid']}" in result.stdout


@pytest.mark.parametrize(
    ("wait_ms", "shown"),
    [
        (0, "0.000 s"),
        (59_999, "59.999 s"),
        (90_000, "1 min 30 s"),
        (5_400_000, "1 h 30 min"),
        (100_799_629_124, "1,166 d 15 h"),
    ],
)
def test_a_wait_is_shown_in_two_units(wait_ms: int, shown: str) -> None:
    """Long waits are shown in days, not in seconds."""
    assert show_wait(wait_ms) == shown


def test_each_state_of_a_message_has_a_line(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        waiting = ball.send("got", "x", after="1h").id
        visible = ball.send("got", "y").id
        result = run_here("get", waiting, "--endpoint", endpoint)
        assert (result.returncode, result.stdout.startswith("waiting, topic got, due 20")) == (0, True)
        ball.cancel(waiting)
    assert run_here("get", waiting, "--endpoint", endpoint).stdout.startswith("cancelled, since 20")
    result = run_here("get", visible, "--topic", "got", "--endpoint", endpoint).stdout
    assert result.startswith("visible, topic got, queue ") and " at 0, since 20" in result
    with Timeball(endpoint) as ball:
        ball.pull("got", "readers-of-got", wait=0)
    result = run_here("get", visible, "--endpoint", endpoint).stdout
    assert "\n  group readers-of-got: leased, until 20" in result and result.rstrip().endswith("attempt 1")
    document = json.loads(run_here("get", visible, "--json", "--endpoint", endpoint).stdout)
    assert (document["id"], document["state"], document["topic"]) == (visible, "visible", "got")


def test_an_unknown_id_is_a_usage_error(endpoint: str) -> None:
    missing = run_here("get", "nobody", "--endpoint", endpoint)
    assert missing.returncode == 2 and "no message has this id" in missing.stderr


def test_pulled_messages_are_acknowledged_for_their_group_only(endpoint: str) -> None:
    """The next pull of the group says on stderr that there is nothing new. Another group gets the message."""
    run_here("send", "pulled", "x", "--endpoint", endpoint)
    first = run_here("pull", "pulled", "--endpoint", endpoint)
    assert first.stdout.endswith("  x\n") and first.stderr == "1 message\n"
    second = run_here("pull", "pulled", "--endpoint", endpoint)
    assert (second.returncode, second.stdout) == (0, "")
    assert "nothing new for group cli" in second.stderr
    assert run_here("pull", "pulled", "--group", "other", "--endpoint", endpoint).stdout.endswith("  x\n")


def test_a_delayed_message_shows_how_late_it_was(endpoint: str) -> None:
    """The lateness stands between the id and the body: milliseconds with a sign."""
    run_here("schedule", "punctual", "x", "--after", "100ms", "--id", "p-1", "--endpoint", endpoint)
    output = run_here("pull", "punctual", "--wait", "30s", "--endpoint", endpoint).stdout
    _, message_id, late, unit, body = output.split()
    assert (message_id, unit, body) == ("p-1", "ms", "x")
    assert late.startswith("+") and int(late) >= 0


def test_a_body_that_is_no_text_is_shown_as_base64_in_json_and_else_as_a_python_literal(
    endpoint: str, flight: str
) -> None:
    with Timeball(endpoint) as ball:
        ball.send("binary", b"\xff\x00")
    result = run_here("pull", "binary", "--peek", "--json", "--endpoint", endpoint, "--flight", flight)
    assert json.loads(result.stdout)["body_base64"] == "/wA="
    assert r"b'\xff\x00'" in run_here("pull", "binary", "--endpoint", endpoint).stdout


def test_a_pull_refuses_an_unknown_topic_unless_it_waits(endpoint: str) -> None:
    """An error in the name must not look like an empty topic. A pull that waits may begin before the topic exists."""
    result = run_here("pull", "no-such-topic", "--endpoint", endpoint)
    assert result.returncode == 2
    assert "no-such-topic" in result.stderr and "--wait" in result.stderr
    result = run_here("pull", "not-yet", "--wait", "10ms", "--endpoint", endpoint)
    assert result.returncode == 0
    assert "0 messages: there is no topic 'not-yet' yet" in result.stderr
    result = run_here("pull", "not-yet", "--endpoint", endpoint)
    assert result.returncode == 2, "a pull creates no topic"


def test_a_pull_with_follow_prints_messages_until_ctrl_c(endpoint: str) -> None:
    """It may begin before the topic exists. It has acknowledged all printed messages when it ends."""
    with running("pull", "followed", "--follow", "--json", "--endpoint", endpoint) as follower:
        for body in ("one", "two"):
            run_here("send", "followed", body, "--endpoint", endpoint)
            assert follower.wait_line(body=body)["topic"] == "followed"
        assert follower.end(signal.SIGINT) == 0
    result = run_here("pull", "followed", "--json", "--endpoint", endpoint)
    assert result.stdout == ""


def _schedule(endpoint: str, *arguments: str) -> str:
    """Schedule a message in the topic `cancelled`, and return its id."""
    return run_here("schedule", "cancelled", "x", *arguments, "--endpoint", endpoint).stdout.strip()


def test_a_waiting_message_is_cancelled_once(endpoint: str) -> None:
    """The second cancel reports the first one, and succeeds."""
    message_id = _schedule(endpoint, "--after", "1h")
    first = run_here("cancel", message_id, "--endpoint", endpoint)
    assert (first.returncode, first.stdout) == (0, f"{message_id}: cancelled\n")
    second = run_here("cancel", message_id, "--endpoint", endpoint)
    assert (second.returncode, second.stdout) == (0, f"{message_id}: was cancelled before\n")


def test_a_cancel_by_key_has_a_verdict_for_each_message_with_the_key(endpoint: str) -> None:
    for _ in range(3):
        _schedule(endpoint, "--after", "1h", "--keys", "order-31", "--keys", "anna")
    result = run_here("cancel", "--key", "order-31", "--json", "--endpoint", endpoint)
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [verdict["verdict"] for verdict in verdicts] == ["cancelled"] * 3
    assert len({verdict["seq"] for verdict in verdicts}) == 3


def test_a_cancel_of_a_released_and_an_unknown_message_exits_with_1(endpoint: str) -> None:
    """The output has the time of the release, and also the verdicts of the other messages."""
    late = _schedule(endpoint, "--after", "0ms")
    pulled = run_here("pull", "cancelled", "--wait", "30s", "--group", "late", "--endpoint", endpoint)
    assert late in pulled.stdout
    waiting = _schedule(endpoint, "--after", "1h")
    result = run_here("cancel", late, "nobody", waiting, "--endpoint", endpoint)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{late}: too late, released at 20")
    assert lines[1:] == ["nobody: no such scheduled message", f"{waiting}: cancelled"]


def test_ids_and_key_exclude_each_other() -> None:
    """The command refuses them before it connects: no broker runs here."""
    result = run_here("cancel", "an-id", "--key", "a-key")
    assert result.returncode == 2
    assert "--key" in result.stderr


def _schedule_later(endpoint: str, *arguments: str) -> str:
    """Schedule a message in the topic `moved`, and return its id."""
    return run_here("schedule", "moved", "x", *arguments, "--endpoint", endpoint).stdout.strip()


def test_a_message_is_rescheduled_to_an_earlier_time_and_not_after_its_release(endpoint: str) -> None:
    message_id = _schedule_later(endpoint, "--after", "1h")
    moved = run_here("reschedule", message_id, "--after", "50ms", "--endpoint", endpoint)
    assert moved.returncode == 0
    assert moved.stdout.startswith(f"{message_id}: rescheduled, due 20")
    pulled = run_here("pull", "moved", "--wait", "30s", "--group", "movers", "--endpoint", endpoint)
    assert message_id in pulled.stdout
    late = run_here("reschedule", message_id, "--after", "1h", "--endpoint", endpoint)
    assert (late.returncode, late.stdout[: len(message_id) + 10]) == (1, f"{message_id}: too late")


def test_a_key_moves_all_messages_with_it_to_a_due_time(endpoint: str) -> None:
    for _ in range(3):
        _schedule_later(endpoint, "--after", "1h", "--keys", "order-77", "--keys", "anna")
    at = "2030-01-31T09:00:00+01:00"
    result = run_here("reschedule", "--key", "order-77", "--at", at, "--json", "--endpoint", endpoint)
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(verdict["verdict"], verdict["due_ms"]) for verdict in verdicts] == [
        ("rescheduled", 1_896_076_800_000)
    ] * 3
    assert run_here("cancel", "--key", "order-77", "--endpoint", endpoint).returncode == 0
    second = run_here("reschedule", "--key", "order-77", "--at", at, "--endpoint", endpoint)
    assert second.returncode == 1 and second.stdout.count("was cancelled before") == 3


@pytest.mark.parametrize("when", [[], ["--after", "1m", "--at", "5"], ["--after", "30"], ["--at", "noon"]])
def test_a_reschedule_needs_exactly_one_valid_due_time(when: list[str]) -> None:
    """The command refuses all of these before it connects: no broker runs here."""
    result = run_here("reschedule", "an-id", *when)
    assert result.returncode == 2
    assert "--a" in result.stderr


def test_each_verdict_has_a_sentence() -> None:
    verdicts = VERDICTS
    assert SENTENCES.keys() == set(verdicts)
    assert len({sentence(Verdict("x", verdict, 1, 0, 5)) for verdict in verdicts}) == len(verdicts)
    assert sentence(Verdict("x", "rescheduled", 1, 0, 5)).endswith("due 1970-01-01T00:00:00.005Z")
    assert sentence(Verdict("x", "released", 1, None)).endswith("released at an unknown time")


def test_a_bad_verdict_fails_the_command_after_all_lines_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    verdicts = [
        Verdict("a", "cancelled", 1, 5),
        Verdict("b", "expired", 2, None),
        Verdict("c", "cancelled", 3, 5),
    ]
    with pytest.raises(typer.Exit) as exited:
        report_ends(verdicts, success_verdicts={"cancelled"}, as_json=True)
    assert exited.value.exit_code == ExitCode.CHECK_FAILED
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["verdict"] for line in lines] == ["cancelled", "expired", "cancelled"]
    report_ends(verdicts, success_verdicts={"cancelled", "expired"}, as_json=False)
    assert capsys.readouterr().out.splitlines()[0] == "a: cancelled"


def test_the_id_is_on_stdout_and_nothing_else(endpoint: str) -> None:
    """A script can read the id from stdout."""
    result = run_here("send", "sent", "hello", "--endpoint", endpoint)
    assert result.returncode == 0
    assert re.fullmatch(r"[0-9a-f]{32}\n", result.stdout)
    assert result.stderr == ""


def test_a_send_with_json_prints_the_receipt(endpoint: str) -> None:
    """A message without a delay has no due time."""
    result = run_here("send", "sent", "hello", "--id", "mine", "--json", "--endpoint", endpoint)
    receipt = json.loads(result.stdout)
    assert receipt["id"] == "mine"
    assert receipt["due_ms"] is None
    assert receipt["seq"] > 0 and receipt["store_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["no spaces allowed", "x"], "topic"),
        (["t" * 300, "x"], "topic"),
        (["sent", "x", "--id", "i" * 5_000], "unique_key"),
        (["sent", "--lines", "nowhere.txt"], "--lines nowhere.txt"),
        (["sent", "x", "--property", "=value"], "NAME=VALUE"),
    ],
    ids=["blank", "long topic", "long id", "no file", "no name"],
)
def test_a_refused_send_names_the_wrong_argument(endpoint: str, arguments: list[str], named: str) -> None:
    """The exit code is 2, with one sentence on stderr and nothing on stdout."""
    result = run_here("send", *arguments, "--endpoint", endpoint)
    assert result.returncode == 2, result.stderr
    assert named in result.stderr
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_invalid_endpoint_is_refused() -> None:
    """The error shows the right form."""
    result = run_here("send", "t", "x", "--endpoint", "localhost:7480")
    assert result.returncode == 2
    assert "http://host:port" in result.stderr


def test_the_endpoint_may_come_from_the_environment(endpoint: str) -> None:
    """docs/operations.md describes TIMEBALL_ENDPOINT."""
    assert run_here("send", "sent", "x", TIMEBALL_ENDPOINT=endpoint).returncode == 0


def test_the_error_of_refused_lines_says_which_lines_were_sent(endpoint: str, tmp_path: Path) -> None:
    """The command sends lines in chunks of 10,000. The broker accepts a chunk as a whole or not at all."""
    file = tmp_path / "lines.txt"
    file.write_bytes(b"x\n" * 50_010 + b"y" * 5_000_000 + b"\n")
    result = run_here("send", "parts", "--lines", str(file), "--endpoint", endpoint)
    assert result.returncode == 2, result
    error = " ".join(result.stderr.split())
    assert (
        "lines 50001 to 50011, here rows 0 to 10" in error and "50000 lines before these were sent" in error
    )
    assert "body: more than 4194304 bytes" in error


def test_a_full_disk_refuses_messages_and_says_so(tmp_path: Path) -> None:
    """The exit code is 5. The broker continues, and messages can still be read."""
    serve = [*COMMAND, "serve", "--json", "--port", "0", "--data", str(tmp_path / "disk" / "d")]
    (tmp_path / "disk").mkdir()
    command = on_small_disk(tmp_path / "disk", 16, [*serve, "--segment-bytes", "4MiB"])
    with running(command=command) as server:
        ready = server.wait_line(event="ready")
        uri, flight = http_endpoint_of(ready), ready["endpoint"]
        body = "x" * 1_000_000
        codes = []
        for _ in range(30):
            result = run_here("send", "big", "-", "--endpoint", uri, text=body)
            codes.append(result.returncode)
            if result.returncode:
                break
        assert codes[0] == 0 and codes[-1] == 5, codes
        assert "disk full" in result.stderr and "free some space" in result.stderr
        assert "NEW MESSAGES ARE REFUSED" in run_here("status", "--endpoint", uri, COLUMNS="500").stdout
        disk = json.loads(run_here("status", "--json", "--endpoint", uri).stdout)["disk"]
        assert "disk full" in disk["no_room"] and disk["free_bytes"] < 4 << 20
        options = ["--max", "1", "--json", "--endpoint", uri, "--flight", flight]
        pulled = run_here("pull", "big", "--peek", *options)
        assert json.loads(pulled.stdout)["body"] == body


def test_a_start_on_a_disk_that_is_too_small_is_a_storage_error(tmp_path: Path) -> None:
    """The broker reports it when it starts, not with the first message."""
    (tmp_path / "disk").mkdir()
    serve = [*COMMAND, "serve", "--json", "--port", "0", "--data", str(tmp_path / "disk" / "d")]
    with running(command=on_small_disk(tmp_path / "disk", 16, serve)) as server:
        assert server.wait_end() == 5
        assert any("disk full" in line for line in server.errors)


DAY_MS = 86_400_000


def test_a_receipt_has_the_due_time(endpoint: str) -> None:
    result = run_here("schedule", "agreed", "x", "--after", "1h30m", "--json", "--endpoint", endpoint)
    assert (result.returncode, result.stderr) == (0, "")
    receipt = json.loads(result.stdout)
    assert receipt.keys() == {"id", "seq", "due_ms", "past_ms", "store_ms", "outcome", "state"}
    assert receipt["due_ms"] - receipt["store_ms"] == 5_400_000


@pytest.mark.parametrize(
    "at", ["2035-01-31T09:00:00+01:00", "2035-01-31T08:00:00Z", "2035-01-31 08:00:00.000Z", "2053843200000"]
)
def test_one_due_time_can_be_written_in_many_forms(endpoint: str, at: str) -> None:
    result = run_here("schedule", "instants", "x", "--at", at, "--json", "--endpoint", endpoint)
    assert json.loads(result.stdout)["due_ms"] == 2_053_843_200_000


def test_a_scheduled_message_is_released_with_all_its_fields(endpoint: str) -> None:
    """The body is read from stdin, byte for byte."""
    fields = [
        "--tag",
        "t",
        "--keys",
        "order-17",
        "--keys",
        "anna",
        "--property",
        "a=1",
        "--property",
        "b=x=y",
    ]
    body = b"\xff\x00 not text\n"
    options = ["--after", "0ms", "--id", "carried-1", *fields, "--endpoint", endpoint]
    assert run_here("schedule", "carried", "-", *options, text=body).stdout == "carried-1\n"
    with Timeball(endpoint) as ball:
        [message] = ball.pull("carried", "g", wait="30s")
    assert (message.body, message.id, message.tag) == (body, "carried-1", "t")
    assert (message.keys, message.properties) == (["order-17", "anna"], {"a": "1", "b": "x=y"})


def test_every_line_of_a_file_is_scheduled(endpoint: str, tmp_path: Path) -> None:
    """All messages have the due time and the key of the command, and one cancel by key covers them."""
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\nthree")
    options = ["--after", "7d", "--keys", "lines-7d", "--endpoint", endpoint]
    assert run_here("schedule", "waiting", "--lines", str(file), *options).stdout == "3 messages sent\n"
    piped = run_here("schedule", "waiting", "--lines", "-", "--json", *options, text="four\r\n\n")
    assert json.loads(piped.stdout) == {"sent": 2}  # an empty line is an empty message
    with Timeball(endpoint) as ball:
        assert [verdict.verdict for verdict in ball.cancel(key="lines-7d")] == ["cancelled"] * 5


def test_a_past_due_time_of_lines_is_noted(endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo")
    options = ["--lines", str(file), "--at", "2020-01-31T09:00:00Z", "--endpoint", endpoint]
    result = run_here("schedule", "past-lines", *options)
    assert result.stdout == "2 messages sent\n"
    assert "the due time was in the past" in result.stderr and "delivered now" in result.stderr
    document = json.loads(run_here("schedule", "past-lines", "--json", *options).stdout)
    assert (document["sent"], document["past_rows"]) == (2, 2) and document["past_ms"] > DAY_MS


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--after"),
        (["--after", "1s", "--at", "2035-01-01T00:00:00Z"], "exactly one of --after"),
        (["--after", "30"], "--after 30: add a unit"),
        (["--after", "soon"], "--after 'soon'"),
        (["--after", "tomorrow"], "or a time with --at"),
        (["--at", "soon"], "--at 'soon'"),
        (["--at", "2035-01-01T00:00:00"], "time zone"),
        (["--after", "1s", "--property", "eu"], "--property 'eu'"),
        (["--after", "1s", "--lines", "no-such-file"], "--lines no-such-file"),
        (["--after", "1s", "--lines", "."], "--lines ."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_impossible_option_is_refused_and_named(endpoint: str, options: list[str], named: str) -> None:
    """The error is one sentence, and nothing is scheduled."""
    result = run_here("schedule", "refused", *options, "--endpoint", endpoint)
    assert (result.returncode, result.stdout) == (2, "")
    assert named in result.stderr and len(result.stderr.splitlines()) == 1
    with Timeball(endpoint) as ball:
        assert "refused" not in ball.topics()


def test_the_advised_forms_of_a_duration_are_accepted() -> None:
    """An earlier version told `--after tomorrow` to write 500, and `--after 500` to add a unit."""
    with pytest.raises(RequestError) as caught:
        parse_due("tomorrow", None)
    advised = re.findall(r"\b\d\w*", str(caught.value))
    assert len(advised) == 4
    assert all(parse_due(text, None)["delay_ms"] for text in advised)


@pytest.mark.parametrize("command", ["schedule", "send"])
@pytest.mark.parametrize("left_out", [["a body"], ["--id", "mine"]], ids=["body", "id"])
def test_options_without_use_for_lines_are_refused(command: str, left_out: list[str], tmp_path: Path) -> None:
    """A body or an id beside --lines would be ignored without an error."""
    (tmp_path / "lines").write_text("one\n")
    timing = ["--after", "1h"] if command == "schedule" else []
    options = ["--lines", str(tmp_path / "lines"), *timing, "--endpoint", NOWHERE]
    result = run_here(command, "orders", *left_out, *options)
    assert (result.returncode, result.stdout) == (2, "")
    assert "--lines and " in result.stderr


@pytest.mark.parametrize("by", [["one"], ["--lines", "lines"]], ids=["message", "lines"])
def test_a_delay_that_is_longer_than_the_limit_of_the_broker_is_refused(
    endpoint: str, by: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is ten years by default. The error has the option, or with --lines its milliseconds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines").write_text("one\n")
    result = run_here("schedule", "too-far", *by, "--after", "4000d", "--endpoint", endpoint)
    assert (result.returncode, result.stdout) == (2, "")
    named_value = str(4000 * DAY_MS)[:9] if "--lines" in by else "after='4000d'"
    assert named_value in result.stderr and "Traceback" not in result.stderr


def test_no_broker_is_one_sentence() -> None:
    assert_says_how_to_reach_one(run_here("schedule", "t", "x", "--after", "1s", "--endpoint", NOWHERE))


def test_the_endpoint_can_come_from_the_environment(endpoint: str) -> None:
    options = ["schedule", "from-environment", "x", "--after", "1h"]
    assert run_here(*options, TIMEBALL_ENDPOINT=endpoint).returncode == 0
    assert run_here(*options, TIMEBALL_ENDPOINT=NOWHERE).returncode == 3


def test_the_examples_of_schedule_show_after_at_and_lines() -> None:
    result = run_here("schedule", "--help")
    assert result.returncode == 0
    _, _, examples = result.stdout.partition("Examples:")
    assert "--after 30m" in examples and "--at 2030-" in examples and "--lines" in examples
