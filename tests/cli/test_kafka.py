"""`timeball kafka`: invalid options are refused by name, before any connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from timeball.cli.main import main


def run_kafka(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Run `timeball kafka`, which must fail. Returns its exit code and stderr."""
    with pytest.raises(SystemExit) as result:
        main(["kafka", *arguments])
    return result.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--in", "a", "--out", "a"], "--out a: the topic of --in"),
        (["--in", "a", "--from", "17"], "--from 17: earliest or latest"),
        (["--in", "a", "--name", "a b"], "--name a b"),
        (["--in", "a", "--kafka-config", "nowhere/file"], "--kafka-config nowhere/file: "),
    ],
)
def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    code, error = run_kafka(capsys, *arguments)
    assert code == 4 and text in error


def test_a_client_property_that_exactly_once_delivery_depends_on_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "client").write_text("acks=0\n")
    code, error = run_kafka(capsys, "--in", "a", "--kafka-config", str(tmp_path / "client"))
    assert code == 4 and "acks cannot be chosen" in error


def test_a_bridge_without_a_topic_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = run_kafka(capsys)
    assert code == 2 and "--in" in error
