"""`timeball import celery` without a Redis; tests/interop/test_celery.py has one."""

from __future__ import annotations

from tests.cli.in_process import run_here
from tests.ports import free_ports


def test_a_redis_that_does_not_answer_is_an_error_of_the_set_up(endpoint: str) -> None:
    (port,) = free_ports(1)
    ran = run_here(
        "import", "celery", "--from", f"redis://:secret@127.0.0.1:{port}/0", "--endpoint", endpoint
    )
    assert ran.returncode == 4
    assert f"127.0.0.1:{port}/0" in ran.stderr and "secret" not in ran.stderr


def test_it_is_named_where_from(endpoint: str) -> None:
    ran = run_here("import", "celery", "--endpoint", endpoint)
    assert ran.returncode == 2 and "--from" in ran.stderr
