"""The document names each path, method and struct that there is, and no other."""

from __future__ import annotations

import json
import re

import msgspec
from tests.protocols.http.client import Client

from timeball.protocols.http.openapi import OPERATIONS
from timeball.protocols.http.openapi import document as made


def test_each_reference_leads_somewhere(client: Client) -> None:
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
        for path, methods in made()["paths"].items()
        for method, operation in methods.items()
        for answer in operation["responses"].values()
        if answer["content"].get("application/json", {"schema": True})["schema"] == {}
    ]
    assert missing == []


def test_each_example_is_a_request_that_can_be_read() -> None:
    structs = {kind.__name__: kind for each in OPERATIONS for kind in each.request if isinstance(kind, type)}
    examples = {
        name: schema["examples"]
        for name, schema in made()["components"]["schemas"].items()
        if "examples" in schema
    }
    # Without one the pages of the API would show an empty body.
    assert examples.keys() == structs.keys()
    for name, found in examples.items():
        for example in found:
            msgspec.convert(example, structs[name])
