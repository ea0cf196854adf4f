"""Settings refuse impossible values, and name the option."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from timeball.model import limits
from timeball.model.config import MIB, Settings, types
from timeball.model.errors import SetupError


def test_the_default_settings_are_valid_and_durable() -> None:
    settings = Settings()
    assert settings.durability == "sync"
    assert settings.delay_ms_max == limits.DELAY_MS_MAX


@pytest.mark.parametrize(
    "allowed",
    [
        {"port": 0},
        {"port": 65_535},
        {"durability": "async"},
        {"segment_bytes": 1 * MIB},
        {"segment_bytes": 2048 * MIB},
        {"queues_per_topic": 1},
        {"queues_per_topic": limits.QUEUES_PER_TOPIC_MAX},
        {"delay_ms_max": 1},
        {"compact_rows": 0},
        {"delay_properties": " TIMING,__STARTDELIVERTIME,"},
    ],
    ids=str,
)
def test_values_at_the_bounds_are_allowed(allowed: dict[str, Any]) -> None:
    Settings(**allowed)


@pytest.mark.parametrize(
    "invalid",
    [
        {"port": -1},
        {"port": 65_536},
        {"durability": "sometimes"},
        {"segment_bytes": 1 * MIB - 1},
        {"segment_bytes": 2048 * MIB + 1},
        {"queues_per_topic": 0},
        {"queues_per_topic": limits.QUEUES_PER_TOPIC_MAX + 1},
        {"delay_ms_max": 0},
        {"delay_ms_max": limits.DELAY_MS_MAX + 1},
        {"compact_rows": -1},
        {"delay_properties": "TIMING,DELAY"},
        {"table_cache_bytes": MIB - 1},
    ],
    ids=str,
)
def test_an_invalid_value_is_refused_with_its_option(invalid: dict[str, Any]) -> None:
    ((field, value),) = invalid.items()
    with pytest.raises(SetupError) as refusal:
        Settings(**invalid)
    assert f"--{field.replace('_', '-')} {value}" in str(refusal.value)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.7", False),
        ("broker.example", False),
        ("localhost.example", False),
    ],
)
def test_plain_text_on_a_reachable_host_is_refused_unless_allowed(host: str, is_local: bool) -> None:
    Settings(host=host, tls_cert="c", tls_key="k")
    Settings(host=host, allow_plaintext=True)
    if is_local:
        Settings(host=host)
        return
    with pytest.raises(SetupError, match=r"--host .*--tls-cert.*--allow-plaintext"):
        Settings(host=host)


def test_a_certificate_without_a_key_or_a_key_alone_is_refused() -> None:
    with pytest.raises(SetupError, match=r"--tls-cert is of no use without --tls-key"):
        Settings(tls_cert="c")
    with pytest.raises(SetupError, match=r"--tls-key is of no use without --tls-cert"):
        Settings(tls_key="k")


def test_a_table_in_an_object_store_is_refused_in_a_cluster() -> None:
    with pytest.raises(SetupError, match="--table is of no use with --cluster"):
        Settings(table="s3://b/t", cluster="shop", node="a", etcd="http://etcd:2379")


def test_every_setting_has_a_help_text_and_a_default_within_its_bounds() -> None:
    for field in dataclasses.fields(Settings):
        assert field.metadata["help"].endswith("."), field.name
        low, high = field.metadata["low"], field.metadata["high"]
        assert low is None or low <= field.default, field.name
        assert high is None or field.default <= high, field.name


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_names_of_numbers_end_with_their_units() -> None:
    numbers = {f.name for f in dataclasses.fields(Settings) if types()[f.name] is int}
    counted = {
        "port",
        "name_server_port",
        "remoting_port",
        "grpc_port",
        "http_port",
        "replication_port",
        "queues_per_topic",
        "compact_rows",
        "timer_congest_num_each_slot",  # RocketMQ's name
    }
    # A new numeric setting ends with its unit, or is a count and is listed here.
    known_units = ("_ms", "_bytes", "_ms_max", "_rows")
    assert {n for n in numbers if not n.endswith(known_units)} <= counted


@pytest.mark.parametrize(("rows", "early_rows"), [(1_000_000, 10_000), (299, 2), (99, 1), (1, 1)])
def test_after_the_interval_a_compaction_needs_a_hundredth_of_the_rows(rows: int, early_rows: int) -> None:
    assert Settings(compact_rows=rows).compact_early_rows == early_rows
