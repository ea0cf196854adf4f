"""Object stores for tests: one server a module, one proxy that makes faults and one place a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.s3_server import BUCKET, FaultyStore, faulty_store, name_endpoint, running_s3

from timeball.table.object_store import ObjectStore


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running_s3() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    with faulty_store(server) as made:
        name_endpoint(monkeypatch, made.endpoint)
        yield made


@pytest.fixture
def store(proxy: FaultyStore) -> ObjectStore:
    return ObjectStore(f"s3a://{BUCKET}/{uuid.uuid4().hex}/pending/")
