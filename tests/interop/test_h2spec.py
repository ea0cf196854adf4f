"""h2spec, the conformance tests for HTTP/2: a Go module, which .ci/run installs. Each failure left has a reason."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.node_fixture import RunningNode, running_node

pytestmark = pytest.mark.interop

H2SPEC = shutil.which("h2spec") or shutil.which(str(Path.home() / "go/bin/h2spec"))
TESTS_MIN = 140
# Flight announces frames of a megabyte. h2spec sends DATA of that size, which exceeds the window of the stream, and
# headers of little more than 16 KiB as too large ones.
OF_LARGE_FRAMES = {
    "Sends a DATA frame with 2^14 octets in length",
    "Sends a large size HEADERS frame that exceeds the SETTINGS_MAX_FRAME_SIZE",
}
LEFT: dict[str, set[str]] = {"grpc": set(), "flight": OF_LARGE_FRAMES}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("h2spec") / "data") as running:
        yield running


@pytest.mark.skipif(
    H2SPEC is None, reason="no h2spec here (Go: go install github.com/summerwind/h2spec/cmd/h2spec)"
)
@pytest.mark.parametrize("edge", ["grpc", "flight"])
def test_the_server_fails_only_known_cases_of_h2spec(node: RunningNode, tmp_path: Path, edge: str) -> None:
    port = node.node.grpc_port if edge == "grpc" else node.node.port
    report = tmp_path / "report.xml"
    assert H2SPEC is not None
    command = [H2SPEC, "-h", "127.0.0.1", "-p", str(port), "-o", "5", "-j", str(report)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    cases = ElementTree.parse(report).findall(".//testcase")
    assert len(cases) >= TESTS_MIN, ran.stdout
    failed = {
        case.get("classname", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }
    assert failed == LEFT[edge]
