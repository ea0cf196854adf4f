"""The fuzzer's targets: each keeps its rules for its seeds and near them, and notices a fault made on purpose."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path

import pytest
from tests.fuzz import __main__ as driver
from tests.fuzz import sanitized
from tests.fuzz.choices import Choices
from tests.fuzz.targets import TARGETS

from timeball.edges.remoting.codec.implementation import COMPILED

needs_compiled = pytest.mark.skipif(COMPILED is None, reason="the codec is not compiled here")
each_target = pytest.mark.parametrize("name", list(TARGETS))
RUNS_MAX = 20_000


def near(seed: bytes, rng: random.Random) -> bytes:
    """Return a seed with a few bytes changed, removed, repeated or inserted."""
    data = bytearray(seed or b"\0")
    for _ in range(rng.randint(1, 3)):
        position, size = rng.randrange(len(data) + 1), rng.randint(1, 4)
        new = rng.choice(
            [
                rng.randbytes(size),
                bytes(data[position : position + size]) * 2,
                b"",
                bytes([rng.choice(b"\0\1\x7f\xff9")]),
            ]
        )
        data[position : position + rng.randint(0, size)] = new
    return bytes(data)


@needs_compiled
@each_target
def test_a_target_keeps_its_rules_for_its_seeds(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert len(set(seeds)) == len(seeds) > 1
    for seed in [b"", *seeds]:
        TARGETS[name].check(seed)


@needs_compiled
@each_target
@pytest.mark.slow
def test_a_target_keeps_its_rules_near_its_seeds(name: str) -> None:
    rng, target = random.Random(1), TARGETS[name]
    seeds = target.seeds()
    for _ in range(300):
        target.check(near(rng.choice(seeds), rng))


@needs_compiled
@each_target
@pytest.mark.slow
def test_a_fault_of_a_reader_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, target = random.Random(1), TARGETS[name]
    seeds = target.seeds()
    target.break_it(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  of any kind: each target has its own fault
        for seed in seeds:
            target.check(seed)
        for _ in range(RUNS_MAX):
            target.check(near(rng.choice(seeds), rng))


def test_decisions_come_from_the_bytes_in_their_order() -> None:
    choices = Choices(b"\1\x02ab\x03xyz")
    assert (choices.byte(), choices.short_bytes(), choices.text()) == (1, b"ab", "xyz")
    assert not choices.are_left
    assert (choices.byte(), choices.number(), choices.text(), choices.rest()) == (0, 0, "", b"")
    assert Choices(b"\0\2").pieces(b"abcdef") == [b"a", b"bcd", b"ef"]
    assert Choices(b"\1\xff\xff").number() == -1


def test_the_log_of_a_run_names_executions_edges_and_the_fault() -> None:
    log = "#12\tNEW    cov: 34 ft: 5\n#99\tDONE   cov: 56 ft: 7\nstat::number_of_executed_units: 99\n"
    assert driver.result_of("t", 1, log, 0) == driver.Result("t", 1, 99, 56, "")
    error = " === Uncaught Python exception: ===\nValueError: x\nTraceback\n"
    assert driver.result_of("t", 1, error + log, 77).fault == "ValueError: x"
    assert driver.result_of(
        "t", 1, "==7==ERROR: AddressSanitizer: heap-buffer-overflow\n", 1
    ).fault.startswith("Addr")
    assert driver.result_of("t", 1, "", -11).fault == "the process ended with -11"
    assert driver.result_of("t", 1, "", None).fault


# ---- the fuzzer itself ----------------------------------------------------------------------------------------

needs_atheris = pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="no atheris here")


@needs_compiled
@needs_atheris
@pytest.mark.slow
def test_the_fuzzer_finds_a_fault_and_keeps_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "FOLDER", tmp_path)
    # Every second time, the fuzzer needs more than 100,000 executions.
    faulty = driver.fuzz("remoting-headers", driver.plain_environment(), ["--break", "-runs=800000"], 240)
    assert faulty.fault and faulty.executions
    assert list((tmp_path / "faults/remoting-headers").glob("crash-*"))
    whole = driver.fuzz("remoting-headers", driver.plain_environment(), ["-runs=2000"], 240)
    assert (whole.fault, whole.executions >= 2_000, whole.edges > 50) == ("", True, True)


@needs_compiled
@needs_atheris
@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.skipif(
    "CI" in os.environ, reason="ten minutes of fuzzing: `make slow` outside CI, or `make fuzz`"
)
def test_ten_minutes_find_no_fault() -> None:
    results = list(driver.fuzz_all(list(TARGETS), 600, sanitized.build()))
    assert not [result for result in results if result.fault or not result.executions], results


def test_the_command_that_installs_atheris_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install"):
        sanitized.atheris_folder()
