"""The own step of the build: stubs are complete, can be imported where they are installed, and can be made again."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = Path("timeball", "edges", "grpc", "_generated")

# It needs a process of its own, because definitions can be registered only once in a process.
LOOK = """
import sys
sys.path.insert(0, sys.argv[1])
from timeball.edges.grpc._generated import definition_pb2, service_pb2
service = service_pb2.DESCRIPTOR.services_by_name["MessagingService"]
print(service.full_name, len(service.methods), definition_pb2.Code.ILLEGAL_DELIVERY_TIME)
"""


@pytest.fixture(scope="module")
def build() -> dict[str, object]:
    """Return the functions of setup.py, without a set-up."""
    arguments, folder = sys.argv, os.getcwd()
    sys.argv = ["setup.py", "--name"]
    os.chdir(ROOT)
    try:
        return runpy.run_path(str(ROOT / "setup.py"))
    finally:
        sys.argv = arguments
        os.chdir(folder)


def test_all_stubs_are_made_and_can_be_imported(build: dict[str, object], tmp_path: Path) -> None:
    build["generate"](tmp_path)  # type: ignore[operator]
    names = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert names == [
        "__init__.py", "definition_pb2.py", "definition_pb2.pyi", "service_pb2.py", "service_pb2.pyi",
    ]  # fmt: skip
    for folder in (FOLDER.parent, FOLDER.parent.parent, FOLDER.parent.parent.parent):
        (tmp_path / folder / "__init__.py").touch()
    result = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == ["apache.rocketmq.v2.MessagingService", "17", "40012"]


def test_stubs_are_made_again_only_for_changed_definitions(build: dict[str, object], tmp_path: Path) -> None:
    build["generate"](tmp_path)  # type: ignore[operator]
    stub = tmp_path / FOLDER / "service_pb2.py"
    stub.write_text("# still here")
    build["generate"](tmp_path)  # type: ignore[operator]
    assert stub.read_text() == "# still here"
    os.utime(stub, (0, 0))
    build["generate"](tmp_path)  # type: ignore[operator]
    assert stub.read_text() != "# still here"


def test_a_connection_without_a_descriptor_is_refused(build: dict[str, object], tmp_path: Path) -> None:
    other = tmp_path / "other_pb2.py"
    other.write_text("DESCRIPTOR = None")
    with pytest.raises(SystemExit, match="has no descriptor"):
        build["descriptor"](other)  # type: ignore[operator]


def test_stubs_are_not_committed() -> None:
    result = subprocess.run(
        ["git", "ls-files", "src/timeball/edges/grpc/_generated"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout == ""
