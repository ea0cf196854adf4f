"""The dashboard's files over HTTP. What they do in a browser: tests/dashboard."""

from __future__ import annotations

import http.client
import re
from importlib.resources import files
from urllib.parse import urljoin

import pytest
from tests.bounds import BOUND_S
from tests.node_fixture import RunningNode

from timeball.edges.http.edge import FILES_PACKAGE, MEDIA_TYPES


def ask(
    node: RunningNode, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Make a request, and return the status, the headers with lower-case names, and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", node.node.http_port, timeout=BOUND_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def names() -> list[str]:
    """Return the files that the package holds, as the browser names them."""
    folder = files(FILES_PACKAGE)
    result = [item.name for item in folder.iterdir() if item.name.rpartition(".")[2] in MEDIA_TYPES]
    return result + [f"pages/{item.name}" for item in folder.joinpath("pages").iterdir()]


def test_each_file_is_served_with_its_media_type(node: RunningNode) -> None:
    assert {"index.html", "app.js", "frame.css", "icon.svg", "pages/punctual.js"} <= set(names())
    for name in names():
        status, headers, data = ask(node, f"/dashboard/{name}")
        assert status == 200 and data == files(FILES_PACKAGE).joinpath(*name.split("/")).read_bytes()
        assert headers["content-type"] == MEDIA_TYPES[name.rpartition(".")[2]]


def test_each_file_is_referenced(node: RunningNode) -> None:
    wanted, seen = ["index.html"], set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        status, _, data = ask(node, f"/dashboard/{name}")
        assert status == 200, name
        for link in re.findall(
            r"""(?:from|href=|src=) ?["']([^"'#]+\.(?:html|js|css|svg))["']""", data.decode()
        ):
            wanted.append(urljoin(name, link).removeprefix("./"))
    assert seen == set(names())


def test_no_file_refers_to_another_host() -> None:
    for name in names():
        text = files(FILES_PACKAGE).joinpath(*name.split("/")).read_text("utf-8")
        # The name of SVG's elements is an address that nothing is fetched from.
        assert not re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+/", text.replace("http://www.w3.org/2000/svg", "")
        ), name


def test_no_script_creates_html_from_text() -> None:
    for name in names():
        text = files(FILES_PACKAGE).joinpath(*name.split("/")).read_text("utf-8")
        assert not re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), name
        assert not re.findall(r"""\sstyle=|\son\w+=["']""", text), name


def test_each_file_has_the_security_headers(node: RunningNode) -> None:
    for path in ("/dashboard/", "/dashboard/reference.html", "/dashboard/app.js", "/dashboard/icon.svg"):
        _, headers, _ = ask(node, path)
        policy = dict(item.strip().split(" ", 1) for item in headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self' data:",
            "connect-src": "'self'", "frame-ancestors": "'none'", "base-uri": "'none'", "form-action": "'self'",
        }  # fmt: skip
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"


def test_only_browsers_are_redirected_from_the_root(node: RunningNode) -> None:
    status, headers, _ = ask(node, "/", accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (status, headers["location"]) == (307, "dashboard/")
    assert ask(node, "/dashboard")[0] == 307
    status, headers, _ = ask(node, "/docs")
    assert (status, headers["location"]) == (307, "dashboard/reference.html")
    assert ask(node, "/", accept="*/*")[0] == 404
    assert ask(node, "/dashboard/", "POST")[0] == 405
    assert ask(node, "/dashboard/", "HEAD")[::2] == (200, b"")


@pytest.mark.parametrize(
    "name",
    ["nothing.js", "../http/edge.py", "%2e%2e/edges/http/edge.py", "..%2fnode.py", "__init__.py", "pages",
     "pages/", "pages//node.js", "/etc/passwd.js", "a\\b.js", "index.html%00.js", "x" * 5000 + ".js"],
)  # fmt: skip
def test_an_unknown_file_is_not_found(node: RunningNode, name: str) -> None:
    status, headers, _ = ask(node, f"/dashboard/{name}")
    assert status == 404 and headers["content-type"] == "application/problem+json"
