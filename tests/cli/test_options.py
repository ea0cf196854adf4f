"""The shared parts of commands: settings as options, sizes and durations, connections, and missing packages."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from tests.certificates import certificate
from tests.cli.in_process import run_here
from tests.node_fixture import running_node
from typer.testing import CliRunner

from timeball.cli.main import main
from timeball.cli.options import (
    SPARK,
    SparkOptions,
    build_settings,
    connect,
    is_third_party,
    not_installed,
    parse_duration_ms,
    parse_property,
    parse_setting_ms,
    parse_size_bytes,
    reach,
    settings_options,
    show_bytes,
    show_ms,
    spark_options,
)
from timeball.cli.output import ExitCode, explain
from timeball.model.config import Settings, option_name
from timeball.model.errors import NotFound, RequestError, SetupError, Unavailable
from timeball.spark.run import SUBMITTED


def test_every_setting_has_an_option() -> None:

    def command(settings: Settings, other: int = 3) -> None:
        del settings, other

    names = {field.name for field in fields(Settings)}
    parameters = inspect.signature(settings_options(command)).parameters
    assert set(parameters) == names | {"settings_file", "other"}


def panels(*words: str) -> dict[str, list[str]]:
    """Read the long options of each panel of a command's help."""
    options_by_panel: dict[str, list[str]] = {}
    for line in run_here(*words, "--help", COLUMNS="400").stdout.splitlines():
        if line.startswith("╭─ "):
            panel = options_by_panel.setdefault(line.split()[1], [])
        elif option := re.match(r"│ (--[a-z-]+)", line):
            panel.append(option[1])
    return options_by_panel


def test_the_help_lists_advanced_settings_in_a_panel_of_their_own() -> None:
    advanced = [option_name(field.name) for field in fields(Settings) if field.metadata["advanced"]]
    for command in ("serve", "up"):
        output = panels(command)
        assert list(output) == ["Options", "Advanced"]
        assert output["Advanced"] == advanced
        assert {"--data", "--host", "--port", "--durability", "--strategy", "--settings"} <= set(
            output["Options"]
        )
    assert list(panels("cluster", "status")) == ["Options"], "a command with few settings has one panel"


def test_a_setting_without_a_value_has_its_default() -> None:
    """None means that the option was not given."""
    assert build_settings(None, {"port": None}) == Settings()


def test_an_option_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    """Sizes and durations are written in the file as on the command line."""
    file = tmp_path / "timeball.toml"
    file.write_text(
        'port = 1\nsegment_bytes = "64MiB"\nretention_ms = "1h"\nauto_create_topics = false\ndata = "d"\n'
    )
    settings = build_settings(file, {"port": 2})
    assert (settings.port, settings.segment_bytes, settings.retention_ms) == (2, 64 << 20, 3_600_000)
    assert settings.auto_create_topics is False
    assert settings.data == Path("d")


@pytest.mark.parametrize(
    ("text", "text_of_error"),
    [
        ("prot = 1", "prot"),
        ('port = "many"', "port"),
        ("port = true", "port"),
        ('segment_bytes = "64M"', "segment_bytes"),
        ("port = ", "timeball.toml"),
        ("port = 70000", "--port"),
    ],
)
def test_an_invalid_entry_of_the_settings_file_is_named(
    tmp_path: Path, text: str, text_of_error: str
) -> None:
    """The error of a file that cannot be parsed names the file."""
    file = tmp_path / "timeball.toml"
    file.write_text(text)
    with pytest.raises(SetupError, match=text_of_error):
        build_settings(file, {})


def test_a_missing_settings_file_is_a_set_up_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="nowhere"):
        build_settings(tmp_path / "nowhere.toml", {})


@pytest.mark.parametrize(
    "name", [field.name for field in fields(Settings) if isinstance(field.default, bool)]
)
@pytest.mark.parametrize("value", [True, False])
def test_a_boolean_option_can_be_switched_on_and_off(name: str, value: bool) -> None:
    """The options are parsed as on a command line."""
    settings_built: list[Settings] = []
    app = typer.Typer()
    app.command()(settings_options(lambda settings: settings_built.append(settings)))
    option = ("--" if value else "--no-") + name.replace("_", "-")
    result = CliRunner().invoke(app, [option])
    assert result.exit_code == 0, result.output
    assert [getattr(settings, name) for settings in settings_built] == [value]


NOWHERE = "http://127.0.0.1:1"  # a port that nothing may listen on


def test_an_unreachable_broker_is_an_error_with_its_address_and_advice() -> None:
    """The advice is to start a broker, over HTTP and over Flight."""
    with (
        pytest.raises(Unavailable, match=rf"{NOWHERE}: start one with 'timeball up'"),
        connect(NOWHERE) as ball,
    ):
        ball.status()
    with pytest.raises(Unavailable, match=r"grpc://127\.0\.0\.1:1: start one with"):
        reach("grpc://127.0.0.1:1")


def test_errors_other_than_a_missing_broker_stay_as_they_are(endpoint: str) -> None:
    """One of them has the same class and another text, as of a broker that stops."""
    with pytest.raises(NotFound), connect(endpoint) as ball:
        ball.queues("nowhere")
    with pytest.raises(Unavailable, match=r"^stopping$"), connect(endpoint):
        raise Unavailable("stopping")


def test_an_error_at_a_broker_with_tls_names_the_scheme_or_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two mistakes are plain text, and a certificate that the client does not trust."""
    monkeypatch.delenv("TIMEBALL_TLS_ROOTS", raising=False)
    issued = certificate(tmp_path / "tls")
    with running_node(tmp_path / "data", **issued.settings) as node:
        with pytest.raises(Unavailable, match=r"write grpc\+tls://"):
            reach(node.endpoint)
        with pytest.raises(Unavailable, match="certificate verify failed"):
            reach(node.endpoint.replace("grpc:", "grpc+tls:"))
        plain = node.http_endpoint.replace("https:", "http:")
        with pytest.raises(Unavailable, match="write https://"), connect(plain) as ball:
            ball.create_topic("orders")
        with (
            pytest.raises(Unavailable, match="certificate verify failed"),
            connect(node.http_endpoint) as ball,
        ):
            ball.create_topic("orders")


def test_a_command_on_spark_builds_spark_options_from_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    @spark_options
    def command(spark: SparkOptions, other: int = 3) -> None:
        calls.append((spark, other))

    assert list(inspect.signature(command).parameters) == ["master", "conf", "packages", "name", "other"]
    command(master="m", conf=["a=1=2", "b=3"], packages=["g:a:1", "g:b:2"], name="mine", other=4)
    [(spark, other)] = calls
    assert other == 4 and dict(spark.conf) == {
        "a": "1=2",
        "b": "3",
        "spark.jars.packages": "g:a:1,g:b:2",
        "spark.app.name": "mine",
    }
    assert spark.words()[:4] == ["--master", "m", "--conf", "a=1=2"]
    assert SparkOptions().words() == []
    with pytest.raises(RequestError, match="--conf a: write NAME=VALUE"):
        command(master=None, conf=["a"], packages=None, name=None)
    monkeypatch.setenv(SUBMITTED, "1234")
    with pytest.raises(RequestError, match="give them to spark-submit"):
        command(master=None, conf=None, packages=["g:a:1"], name=None)


PRINT_HOW_OPTIONS_ARE_READ = """
import sys
from timeball.cli.main import main

try:
    main(sys.argv[1:])
finally:
    print("validators" if "pydantic" in sys.modules else "plain")
"""


@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["--port", "7", "--json", "--data", "d", "--host", "h", "--retention-ms", "1h"], "plain"),
        # The control: Typer explains a value that is refused, and imports the validators for that.
        (["--port", "x"], "validators"),
    ],
)
def test_a_broker_reads_its_options_without_validators(tmp_path: Path, words: list[str], how: str) -> None:
    # The settings file is missing, so the command ends where the options have been read.
    missing = str(tmp_path / "missing.toml")
    command = [sys.executable, "-c", PRINT_HOW_OPTIONS_ARE_READ, "serve", *words, "--settings", missing]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.split() == [how]
    assert ("missing.toml" in result.stderr) == (how == "plain")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--port", "1.5"], "valid integer"),
        (["--segment-bytes", "many"], "--segment-bytes"),
        (["--retention-ms", "3fx"], "write 500"),
    ],
)
def test_a_refused_option_is_explained(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *words])
    assert end.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_boolean_setting_of_the_environment_may_be_the_word_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Typer knows all words for yes and no. The exit code 4 is that of the missing settings file."""
    monkeypatch.setenv("TIMEBALL_AUTO_CREATE_TOPICS", "off")
    monkeypatch.setenv("TIMEBALL_PORT", "7")
    with pytest.raises(SystemExit) as end:
        main(["serve", "--settings", str(tmp_path / "missing.toml")])
    assert end.value.code == 4


def test_the_error_for_a_missing_package_has_the_command_that_installs_its_extra() -> None:
    error = not_installed(ModuleNotFoundError("No module named 'pyspark'", name="pyspark"), SPARK)
    assert str(error) == (
        "pyspark is not installed: install the extra, in a checkout of Timeball pip install '.[spark]', of a release "
        "pip install 'TIMEBALL.whl[spark]' TIMEBALL_BROKER.whl"
    )


@pytest.mark.parametrize(
    ("name", "is_of_others"),
    [
        ("deltalake", True),
        ("google.protobuf", True),
        ("timeball.node.node", False),
        ("sqlite3", False),
        (None, False),
    ],
)
def test_only_a_missing_third_party_package_is_a_set_up_error(name: str | None, is_of_others: bool) -> None:
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert is_third_party(error) is is_of_others
    assert explain(error)[1] == (ExitCode.SETUP if is_of_others else ExitCode.FAULT)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("268435456", 268_435_456),
        ("256MiB", 268_435_456),
        ("256 mib", 268_435_456),
        ("1.5KiB", 1_536),
        ("1GB", 1_000_000_000),
        ("2TiB", 2 << 40),
        ("7B", 7),
    ],
)
def test_a_size_is_parsed_to_bytes(text: str, size_bytes: int) -> None:
    """Units are binary or decimal, in any case, with or without a blank."""
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1M", "1 xB", "0.3B", "1e6", "1 MiB 2"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    """1M is refused, because some people read it as 1,000,000 and others as 1,048,576."""
    with pytest.raises(RequestError):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("0", 0),
        ("250ms", 250),
        ("90s", 90_000),
        ("1.5s", 1_500),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("72H", 259_200_000),
        ("7d", 604_800_000),
        ("2w", 1_209_600_000),
        ("PT30M", 1_800_000),
    ],
)
def test_a_duration_is_parsed_to_milliseconds(text: str, duration_ms: int) -> None:
    """Only 0 needs no unit."""
    assert parse_duration_ms(text) == parse_setting_ms(text) == duration_ms


@pytest.mark.parametrize("text", ["250", " 5 ", "007"])
def test_a_number_without_a_unit_is_milliseconds_only_where_the_name_says_so(text: str) -> None:
    with pytest.raises(RequestError, match=rf"^{text.strip()}: add a unit, as in 500ms or 10s$"):
        parse_duration_ms(text)
    assert parse_setting_ms(text) == int(text)


@pytest.mark.parametrize("text", ["", "h", "1x", "-5s", "1h-30m", "10 minutes", "1.5"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    """Both parsers refuse the same texts."""
    for parse in (parse_duration_ms, parse_setting_ms):
        with pytest.raises(RequestError):
            parse(text)


@given(st.integers(min_value=0, max_value=10**13))
def test_a_formatted_duration_is_parsed_to_the_same_duration(duration_ms: int) -> None:
    """A user can copy a duration from a help text or an error into a command."""
    assert parse_duration_ms(show_ms(duration_ms)) == duration_ms


@given(st.integers(min_value=0, max_value=1023), st.sampled_from([0, 10, 20, 30]))
def test_a_formatted_size_in_one_unit_is_parsed_to_the_same_size(count: int, shift: int) -> None:
    """A user can copy a size from a help text into a command."""
    assert parse_size_bytes(show_bytes(count << shift)) == count << shift


def test_a_property_has_a_name_and_a_value() -> None:
    """The value may contain an equal sign."""
    assert parse_property("region=eu=west") == ("region", "eu=west")
    for text in ("region", "=eu", ""):
        with pytest.raises(RequestError):
            parse_property(text)


@pytest.mark.parametrize(
    "words",
    [
        ["pull", "orders", "--wait", "30"],
        ["status", "--watch", "--every", "10"],
        ["cluster", "drain", "--group", "g1", "--to", "g2", "--wait", "60"],
        ["cluster", "init", "--nodes", "a,b,c", "--wait", "60"],
        ["replay", "--from", "2030-01-01T00:00:00Z", "--until", "2030-01-02T00:00:00Z", "--shift", "7"],
        ["kafka", "--in", "a", "--status-every", "10"],
        ["forecast", "--within", "5"],
        ["forecast", "--extra-over", "5"],
        ["schedule", "orders", "x", "--after", "30"],
        ["reschedule", "a", "--after", "30"],
    ],
    ids=" ".join,
)
def test_a_number_without_a_unit_is_refused(words: list[str]) -> None:
    """It was milliseconds in an earlier version, and most people expect seconds."""
    result = run_here(*words)
    error = " ".join(result.stderr.replace("│", " ").split())
    assert result.returncode == 2
    assert words[-2] in error
    assert f"{words[-1]}: add a unit, as in 500ms or 10s" in error
