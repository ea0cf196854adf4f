"""`Control.revoke` cancels a pending task, and stores its result as a worker of Celery would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import TaskRevokedError

from timeball.client.celery import Control
from timeball.testing import TestBroker

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:celery"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning:celery"),
]


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as running:
        yield running


def close_task(broker: TestBroker, backend: str | None) -> Any:
    url = broker.endpoint.replace("http", "timeball", 1)
    app = Celery("shop", broker=url, backend=backend, control=Control, set_as_current=False)

    @app.task(shared=False, name="shop.close")
    def close() -> None:
        pass

    return close


def test_nobody_waits_for_the_result_of_a_cancelled_task(broker: TestBroker) -> None:
    close = close_task(broker, "cache+memory://")
    results = [close.apply_async(countdown=60) for _ in range(2)]
    results[0].revoke()
    for verdict in ("cancelled", "already_cancelled"):
        assert [each.verdict for each in close.app.control.revoke([results[1].id])] == [verdict]
    for result in results:
        assert result.state == states.REVOKED
        with pytest.raises(TaskRevokedError):
            result.get(timeout=1)


def test_a_result_that_is_there_stays(broker: TestBroker) -> None:
    close = close_task(broker, "cache+memory://")
    result = close.apply_async(countdown=60)
    close.app.backend.mark_as_done(result.id, 17)
    result.revoke()
    assert result.get(timeout=1) == 17


@pytest.mark.parametrize("backend", [None, "rpc://"])
def test_a_backend_without_such_results(
    broker: TestBroker, backend: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    close = close_task(broker, backend)
    (verdict,) = close.app.control.revoke(close.apply_async(countdown=60).id)
    assert verdict.verdict == "cancelled" and not caplog.records


def test_a_backend_that_fails(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = close_task(broker, "cache+memory://")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no answer")

    monkeypatch.setattr(close.app.backend, "mark_as_revoked", fail)
    (verdict,) = close.app.control.revoke(close.apply_async(countdown=60).id)
    assert verdict.verdict == "cancelled"
    assert "result not stored" in caplog.text and "no answer" in caplog.text
