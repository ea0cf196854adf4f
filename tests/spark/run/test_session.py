"""Tests of timeball.spark.run.session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from timeball.model.errors import SetupError, Unavailable
from timeball.spark.run import session as module
from timeball.spark.run.session import LOCAL, LOCAL_MASTER, continuous, settings
from timeball.spark.source.spark_api import spark_errors


def test_a_session_on_a_cluster_has_no_local_settings() -> None:
    local, cluster = settings("local[2]"), settings("spark://host:7077")
    assert local["spark.driver.host"] == "127.0.0.1"
    assert not set(cluster) & (set(LOCAL) - {"spark.driver.extraJavaOptions"})
    assert "SerialGC" not in cluster["spark.driver.extraJavaOptions"]


def test_only_a_local_session_of_continuous_jobs_has_a_heap_that_shrinks() -> None:
    option = "spark.driver.extraJavaOptions"
    assert "MaxHeapFreeRatio" in settings("local[2]", continuous("local[2]"))[option]
    assert "MaxHeapFreeRatio" not in settings("local[2]")[option], "a session for batch jobs"
    assert continuous("spark://host:7077") == {}
    assert continuous("local[2]", {option: "-Dmine=1"})[option] == "-Dmine=1"


def test_conf_of_the_caller_overrides_settings() -> None:
    result = settings("local[2]", {"spark.driver.memory": "3g", "spark.driver.extraJavaOptions": "-Dmine=1"})
    assert result["spark.driver.memory"] == "3g"
    assert "-Dmine=1" in result["spark.driver.extraJavaOptions"]
    assert "log4j2.configurationFile" in result["spark.driver.extraJavaOptions"]


def test_without_a_master_the_session_is_local() -> None:
    assert settings(None) == settings(LOCAL_MASTER) and LOCAL_MASTER.startswith("local")
    assert settings("spark://host:7077")["spark.master"] == "spark://host:7077"


@pytest.mark.spark
def test_java_home_is_restored_after_the_launch_of_the_jvm(spark: SparkSession) -> None:
    assert "timeball" not in os.environ.get("JAVA_HOME", "")
    assert spark.range(3).count() == 3


# A daemon for Spark's workers. The first time it is started, it ends before it has reported its port.
FAILS_ONCE = """
import os, sys
from pathlib import Path
from pyspark.daemon import manager

if sys.argv[1:] == ["pyspark.worker"]:
    try:
        Path(os.environ["FAILED_ONCE"]).touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        sys.exit(1)
manager()
"""
COUNTS_ROWS = """
import sys
from timeball.model.errors import TimeballError
from timeball.spark.run.session import build_session
from timeball.spark.source.spark_api import spark_errors

spark = build_session(sys.argv[1], conf={"spark.python.daemon.module": "fails_once"})
try:
    with spark_errors():
        print("rows", spark.sparkContext.range(4).map(abs).count())
except TimeballError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.spark
@pytest.mark.parametrize(
    ("master", "printed"), [("local[2]", Unavailable.__name__), (LOCAL_MASTER, "rows 4")]
)
def test_a_task_is_repeated_if_its_worker_does_not_start(tmp_path: Path, master: str, printed: str) -> None:
    """LOCAL_MASTER allows two attempts, `local[2]` only one."""
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    search_path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    counting = subprocess.run(
        [sys.executable, "-c", COUNTS_ROWS, master],
        env={**os.environ, "PYTHONPATH": search_path, "FAILED_ONCE": str(tmp_path / "failed")},
        capture_output=True,
        text=True,
    )
    assert counting.stdout.startswith(printed), counting
    assert (tmp_path / "failed").exists()
    assert ("did not start in time" in counting.stdout) is (master != LOCAL_MASTER)


@pytest.mark.spark
def test_a_bad_option_reaches_the_user_as_one_sentence(spark: SparkSession) -> None:
    with (
        pytest.raises(SetupError, match=r"^option colour: unknown; there are endpoint, ") as caught,
        spark_errors(),
    ):
        spark.read.format("timeball").option("colour", "red").load()
    assert caught.value.__cause__ is not None
    assert len(str(caught.value.__cause__).splitlines()) <= 3, "no stack trace of Spark's worker"


def fake_java(home: Path, version: str) -> Path:
    """Make a Java home whose command prints this version, and then its arguments."""
    command = home / "bin/java"
    command.parent.mkdir(parents=True)
    command.write_text(
        f'#!/bin/sh\necho \'openjdk version "{version}" 2025-04-15\' >&2\nprintf "%s\\n" "$@"\n'
    )
    command.chmod(0o700)
    return home


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "25" 2025-09-16', 25),
        ("command not found", None),
    ],
)
def test_the_major_version_is_parsed_from_the_output_of_java(text: str, version: int | None) -> None:
    assert module.parse_version(text) == version


def test_java_home_is_preferred_to_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen, other = fake_java(tmp_path / "chosen", "21.0.1"), fake_java(tmp_path / "other", "17.0.1")
    result = module.java_home({"JAVA_HOME": str(chosen), "PATH": str(other / "bin")})
    assert str(chosen) in (result / "bin/java").read_text()


def test_an_old_java_home_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    old, new = fake_java(tmp_path / "old", "1.8.0_402"), fake_java(tmp_path / "new", "17.0.1")
    result = module.java_home({"JAVA_HOME": str(old), "PATH": f"{new / 'bin'}"})
    assert str(new) in (result / "bin/java").read_text()


def test_without_a_usable_java_the_error_names_the_version_and_the_candidates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "bundled_home", lambda: None)
    old = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(SetupError, match=r"Java 17 or later.*JAVA_HOME.*is Java 11"):
        module.java_home({"JAVA_HOME": str(old), "PATH": ""})


def test_missing_package_gives_no_java_home() -> None:
    def missing(_: str) -> object:
        raise ImportError

    assert module.bundled_home(missing) is None


def test_the_wrapper_drops_one_flag_and_nothing_else(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "real java", "25.0.1")
    wrapper = module.wrap_java_home(home, cache=tmp_path / "cache")
    arguments = ["-cp", "a b", module.DROPPED_FLAG, "--add-modules=jdk.other", "Main", ""]
    result = subprocess.run([wrapper / "bin/java", *arguments], capture_output=True, text=True, check=True)
    passed = result.stdout.split("\n")[:-1]
    assert passed == ["-cp", "a b", "--add-modules=jdk.other", "Main", ""]


def test_wrapper_is_written_once_and_repaired(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "real", "25.0.1")
    script = module.wrap_java_home(home, cache=tmp_path / "cache") / "bin/java"
    before = script.stat().st_ino
    assert module.wrap_java_home(home, cache=tmp_path / "cache") / "bin/java" == script
    assert script.stat().st_ino == before
    text = script.read_text()
    script.write_text("damaged")
    module.wrap_java_home(home, cache=tmp_path / "cache")
    assert script.read_text() == text
    assert os.access(script, os.X_OK)
    assert script.stat().st_mode & 0o077 == 0


def test_unwritable_cache_falls_back_to_a_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    file = module.cached_file("x/y", "text", cache=tmp_path / "cache")
    assert file.read_text() == "text"
