"""The tree of errors: every class has its own code, and is restored from it at the other end of a connection."""

from __future__ import annotations

import pytest

from timeball.model import errors
from timeball.model.errors import TimeballError, from_code

# Clients of every release know these.
CODES = {
    "error": "TimeballError",
    "bad_request": "RequestError",
    "invalid_message": "InvalidMessage",
    "invalid_name": "InvalidName",
    "conflict": "Conflict",
    "already_pending": "AlreadyPending",
    "invalid_delay": "InvalidDelay",
    "invalid_filter": "InvalidFilter",
    "unauthorized": "Unauthorized",
    "forbidden": "Forbidden",
    "invalid_receipt": "InvalidReceipt",
    "not_found": "NotFound",
    "group_not_found": "GroupNotFound",
    "out_of_range": "OutOfRange",
    "over_limit": "OverLimit",
    "unavailable": "Unavailable",
    "lease_lost": "LeaseLost",
    "not_leader": "NotLeader",
    "peer": "PeerError",
    "setup": "SetupError",
    "storage": "StorageError",
    "corrupt": "Corrupt",
    "missing_file": "MissingFile",
    "disk_failed": "DiskFailed",
}


def every_error(root: type[TimeballError] = TimeballError) -> list[type[TimeballError]]:
    return [root, *(error for child in root.__subclasses__() for error in every_error(child))]


def test_each_error_has_the_distinct_code_that_clients_know() -> None:
    own_errors = [error for error in every_error() if error.__module__ == errors.__name__]
    assert sorted((error.code, error.__name__) for error in own_errors) == sorted(CODES.items())


@pytest.mark.parametrize(("code", "name"), CODES.items())
def test_from_code_builds_the_error_of_a_code(code: str, name: str) -> None:
    error = from_code(code, "what to do")
    assert type(error) is getattr(errors, name)
    assert str(error) == "what to do"


def test_a_code_of_a_newer_release_becomes_the_base_class() -> None:
    assert type(from_code("invented_later", "text")) is TimeballError


def test_the_module_docstring_lists_every_error() -> None:
    words = {word for word in (errors.__doc__ or "").split() if word.isidentifier()}
    assert set(CODES.values()) <= words


def test_errors_are_subclasses_by_who_must_act() -> None:
    for request in (
        "InvalidMessage",
        "InvalidDelay",
        "InvalidFilter",
        "Unauthorized",
        "Forbidden",
        "NotFound",
        "OutOfRange",
    ):
        assert issubclass(getattr(errors, request), errors.RequestError)
    for storage in ("Corrupt", "DiskFailed"):
        assert issubclass(getattr(errors, storage), errors.StorageError)
    # Waiting helps, so a caller who catches RequestError must not see it as its own fault.
    assert not issubclass(errors.OverLimit, (errors.RequestError, errors.StorageError))
