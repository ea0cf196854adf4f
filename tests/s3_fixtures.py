"""Object stores for tests: one server a module, one proxy that makes faults and one prefix of keys a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.s3_server import BUCKET, FaultyStore, faulty_store, name_endpoint, running_s3

from timeball.table.object_store import ObjectStore


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run an S3 server, and yield its endpoint."""
    with running_s3() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """Run a proxy, at which this process finds S3."""
    with faulty_store(server) as proxy:
        name_endpoint(monkeypatch, proxy.endpoint)
        yield proxy


@pytest.fixture
def store(proxy: FaultyStore) -> ObjectStore:
    """Return a store below a prefix that no other test uses."""
    return ObjectStore(f"s3a://{BUCKET}/{uuid.uuid4().hex}/pending/")
