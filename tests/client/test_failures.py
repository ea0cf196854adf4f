"""Flight's errors become ours: class, text, and nothing of gRPC's inside."""

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from timeball.client.failures import translate, translated
from timeball.errors import NotFound, TimeballError, Unavailable

ENDPOINT = "grpc://127.0.0.1:1"


def test_codes_become_classes_with_their_text() -> None:
    wire = "no topic 'x'. Detail: Failed. gRPC client debug context: UNKNOWN:no topic. Client context: OK"
    error = translate(flight.FlightServerError(wire, extra_info=b"not_found"), ENDPOINT)
    assert type(error) is NotFound and str(error) == "no topic 'x'"


def test_an_unknown_code_becomes_the_base_class() -> None:
    assert type(translate(flight.FlightServerError("x", extra_info=b"new"), ENDPOINT)) is TimeballError
    assert type(translate(flight.FlightServerError("x", extra_info=b"\xff"), ENDPOINT)) is TimeballError


@pytest.mark.parametrize(
    "error",
    [flight.FlightUnavailableError("x"), flight.FlightTimedOutError("x"), flight.FlightCancelledError("x")],
)
def test_no_answer_is_unavailable_and_names_the_endpoint(error: flight.FlightError) -> None:
    ours = translate(error, ENDPOINT)
    assert type(ours) is Unavailable and ENDPOINT in str(ours)


def test_a_connection_that_broke_is_unavailable() -> None:
    assert type(translate(flight.FlightInternalError("stream broke"), ENDPOINT)) is Unavailable


def test_another_server_is_named_as_such() -> None:
    ours = translate(pa.ArrowInvalid("what?"), ENDPOINT)
    assert type(ours) is TimeballError and "something else than a broker" in str(ours)


def test_ours_pass_and_others_are_left_alone() -> None:
    with pytest.raises(NotFound), translated(ENDPOINT):
        raise NotFound("x")
    with pytest.raises(KeyError), translated(ENDPOINT):
        raise KeyError("x")
    with pytest.raises(Unavailable), translated(ENDPOINT):
        raise flight.FlightUnavailableError("x")
