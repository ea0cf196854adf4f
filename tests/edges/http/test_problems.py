"""The problem document of each error: its status, its code, and no secret of ours."""

from __future__ import annotations

from timeball.edges.http.requests import problem_of
from timeball.edges.shared.error_codes import Refused
from timeball.model.errors import DiskFailed, OverLimit, Unauthorized


def test_each_error_has_its_status_and_code() -> None:
    for error, status, code in (
        (OverLimit("x"), 429, "over_limit"),
        (Unauthorized("x"), 401, "unauthorized"),
        (DiskFailed("x"), 503, "disk_failed"),
        (Refused(415, "x"), 415, "bad_request"),
        (KeyError("secret"), 500, "error"),
    ):
        answer = problem_of(error)
        assert (answer.status, answer.value["code"]) == (status, code)
        assert "secret" not in answer.value["detail"]
