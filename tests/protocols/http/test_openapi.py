"""The document names each path, method and struct that there is, and no other."""

from __future__ import annotations

import json
import re

from tests.protocols.http.client import Client

from timeball.protocols.http.handlers import Handlers


def test_each_path_and_method_is_there(client: Client, node) -> None:  # type: ignore[no-untyped-def]
    document = client.ask("GET", "/openapi.json").value
    handlers = Handlers(node.broker, node.node.metrics)
    known = {
        (path.replace(":path", ""), method)
        for paths in (handlers.paths, handlers.open_paths)
        for path, methods in paths.items()
        for method in methods
    }
    assert known == {(path, each.upper()) for path, methods in document["paths"].items() for each in methods}


def test_each_reference_leads_somewhere(client: Client) -> None:
    document = client.ask("GET", "/openapi.json").value
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names == document["components"]["schemas"].keys()
    send = document["paths"]["/v1/topics/{topic}/messages"]["post"]
    assert set(send["requestBody"]["content"]) == {"application/json", "application/x-ndjson"}
