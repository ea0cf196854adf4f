"""The OpenAPI document has each path, method and struct of the edge, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec
import pytest
from tests.edges.http.client import Client
from tests.edges.http.openapi import FILE, OPERATIONS, encoded
from tests.edges.http.openapi import document as build_document
from tests.node_fixture import RunningNode, running_node

from timeball.edges.http.edge import QUERY_PARAMETERS
from timeball.io.clock import ManualClock


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """Start a node that has all paths: those of a manual clock, too."""
    with running_node(tmp_path_factory.mktemp("http") / "data", ManualClock(), http_port=0) as running:
        yield running


def test_the_file_equals_the_document_built_from_the_structs() -> None:
    assert FILE.read_bytes() == encoded(), "run `make openapi`"


def test_the_server_knows_the_query_parameters_of_each_operation() -> None:
    expected: dict[str, dict[str, tuple[str, ...]]] = {}
    for item in OPERATIONS:
        expected.setdefault(item.path, {})[item.method.upper()] = tuple(name for name, *_ in item.query)
    assert expected == QUERY_PARAMETERS


def test_each_reference_has_a_target(client: Client) -> None:
    document = client.ask("GET", "/openapi.json").value
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names == document["components"]["schemas"].keys()
    send = document["paths"]["/v1/topics/{topic}/messages"]["post"]
    assert set(send["requestBody"]["content"]) == {
        "application/json",
        "application/x-ndjson",
        "application/vnd.apache.arrow.stream",
        "application/octet-stream",
    }


def test_each_answer_is_described() -> None:
    missing = [
        f"{method} {path}"
        for path, methods in build_document()["paths"].items()
        for method, operation in methods.items()
        for answer in operation["responses"].values()
        if answer["content"].get("application/json", {"schema": True})["schema"] == {}
    ]
    assert missing == []


def test_each_example_is_a_valid_request() -> None:
    structs = {kind.__name__: kind for item in OPERATIONS for kind in item.request if isinstance(kind, type)}
    examples = {
        name: schema["examples"]
        for name, schema in build_document()["components"]["schemas"].items()
        if "examples" in schema
    }
    # Without one the pages of the API would show an empty body.
    assert examples.keys() == structs.keys()
    for name, result in examples.items():
        for example in result:
            msgspec.convert(example, structs[name], str_keys=True)


def test_each_operation_refuses_an_unknown_parameter(client: Client) -> None:
    for item in OPERATIONS:
        path = re.sub(r"{(\w+)}", "1", item.path)
        refused = client.ask(item.method.upper(), path, query={"leese": "600s"})
        assert (refused.status, refused.value["code"]) == (400, "bad_request"), (item.name, refused)
        reported = refused.value["detail"]
        assert "parameter 'leese' is not known" in reported, (item.name, reported)
        assert all(name in reported for name, *_ in item.query)
    twice = client.ask("GET", "/v1/groups?max=1&max=2")
    assert (twice.status, "'max' is there 2 times" in twice.value["detail"]) == (400, True)


def test_an_unknown_field_is_refused_with_the_valid_fields(client: Client) -> None:
    for body in ({"body": "x", "aftre": "1h"}, [{"body": "x", "aftre": "1h"}]):
        refused = client.send("fields", body)
        assert refused.status == 400
        assert "did you mean 'after'? valid: " in refused.value["detail"], refused.value
