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
    with TestBroker() as broker:
        yield broker


def close_task(broker: TestBroker, backend: str | None, host: str = "") -> Any:
    """The task shop.close of a new app, with this backend for results and this virtual host."""
    url = f"{broker.endpoint.replace('http', 'timeball', 1)}/{host}"
    app = Celery("shop", broker=url, backend=backend, control=Control, set_as_current=False)

    @app.task(shared=False, name="shop.close")
    def close() -> None:
        pass

    return close


def test_the_result_of_a_cancelled_task_is_revoked(broker: TestBroker) -> None:
    close = close_task(broker, "cache+memory://")
    results = [close.apply_async(countdown=60) for _ in range(2)]
    results[0].revoke()
    for verdict in ("cancelled", "already_cancelled"):
        assert [answer.verdict for answer in close.app.control.revoke([results[1].id])] == [verdict]
    for result in results:
        assert result.state == states.REVOKED
        with pytest.raises(TaskRevokedError):
            result.get(timeout=1)


def test_a_revoke_keeps_a_result_that_is_stored(broker: TestBroker) -> None:
    close = close_task(broker, "cache+memory://")
    result = close.apply_async(countdown=60)
    close.app.backend.mark_as_done(result.id, 17)
    result.revoke()
    assert result.get(timeout=1) == 17


@pytest.mark.parametrize("backend", [None, "rpc://"])
def test_a_revoke_without_a_backend_for_results_cancels_and_logs_nothing(
    broker: TestBroker, backend: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    close = close_task(broker, backend)
    (verdict,) = close.app.control.revoke(close.apply_async(countdown=60).id)
    assert verdict.verdict == "cancelled" and not caplog.records


def test_a_revoke_cancels_although_the_backend_fails(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = close_task(broker, "cache+memory://")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no answer")

    monkeypatch.setattr(close.app.backend, "mark_as_revoked", fail)
    (verdict,) = close.app.control.revoke(close.apply_async(countdown=60).id)
    assert verdict.verdict == "cancelled"
    assert "result not stored" in caplog.text and "no answer" in caplog.text


def test_a_revoke_cancels_nothing_of_another_virtual_host(broker: TestBroker) -> None:
    shop, bank = (close_task(broker, None, host) for host in ("revoke-shop", "revoke-bank"))
    for close in (shop, bank):
        close.apply_async(countdown=60, task_id="order-17")
    broker.client().send("reminders", "x", after="1h", keys="order-17")
    for verdict in ("cancelled", "not_found"):
        assert [(answer.subject, answer.verdict) for answer in shop.app.control.revoke("order-17")] == [
            ("order-17", verdict)
        ]
        assert len(broker.pending("revoke-bank-celery")) == len(broker.pending("reminders")) == 1
    assert broker.pending("revoke-shop-celery") == []


def test_an_id_that_cannot_be_a_key_does_not_stop_the_others_of_a_list(broker: TestBroker) -> None:
    close = close_task(broker, "cache+memory://")
    first, with_blank, last = (
        close.apply_async(countdown=60, task_id=task_id) for task_id in ("first-1", "order 17", "last-1")
    )
    verdicts = close.app.control.revoke([first.id, with_blank.id, last.id])
    assert [verdict.verdict for verdict in verdicts] == ["cancelled", "not_found", "cancelled"]
    assert (first.state, with_blank.state, last.state) == (states.REVOKED, states.PENDING, states.REVOKED)
