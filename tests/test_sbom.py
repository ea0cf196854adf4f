"""The bills of materials of `make sbom`: each names every package of its lock file, with version and hashes.

`make sbom` and `make slow` install the tool.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from typing import Any

import pytest
from tests.docs_pages import ROOT

from timeball import __version__

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sbom"),  # all are made once
    pytest.mark.skipif(
        not (ROOT / ".venv/release").exists(),
        reason="no CycloneDX here: `make sbom` and `make slow` install it",
    ),
]
LOCKS = ("client", "cli", "broker", "image", "all")


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Make the bills once, and return each by its file name."""
    folder = tmp_path_factory.mktemp("sbom")
    # Make would install the tool again if a lock file is younger. `make slow` itself does that.
    command = ["make", "--old-file=.venv/release", "sbom", f"SBOM_IN={folder}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    bills = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert set(bills) == {f"timeball-{name}.cdx.json" for name in LOCKS}
    return bills


def locked(name: str) -> dict[str, tuple[str, set[str]]]:
    """Return each package of a lock file with its version and hashes, read line by line."""
    packages: dict[str, tuple[str, set[str]]] = {}
    package = ""
    for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines():
        if match := re.match(r"([a-z0-9][a-z0-9._-]*)==(\S+)", line):
            package = match[1]
            packages[package] = (match[2], set())
        if match := re.match(r"\s+--hash=sha256:(\w{64})", line):
            packages[package][1].add(match[1])
    return packages


def direct(name: str) -> set[str]:
    """Return the packages that pyproject.toml itself names for a lock file: of the client, or of an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"].get({"image": "broker"}.get(name, name), [])
    named = {re.split(r"[\[<>=~!; ]", line)[0] for line in [*project["dependencies"], *extra]}
    return named - {"timeball"}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_the_lock_file_is_named(bills: dict[str, dict[str, Any]], name: str) -> None:
    packages = locked(name)
    assert len(direct(name)) >= 2 and direct(name) <= set(packages)
    assert all(hashes for _, hashes in packages.values())
    bill = bills[f"timeball-{name}.cdx.json"]
    components = {
        component["name"]: (
            component["version"],
            {
                digest["content"]
                for reference in component["externalReferences"]
                for digest in reference.get("hashes", [])
            },
        )
        for component in bill["components"]
    }
    assert components == packages
    assert all(
        component["purl"].startswith(f"pkg:pypi/{component['name']}@") for component in bill["components"]
    )


def test_each_bill_names_this_version(bills: dict[str, dict[str, Any]]) -> None:
    for bill in bills.values():
        component = bill["metadata"]["component"]
        assert (bill["bomFormat"], component["name"], component["version"]) == (
            "CycloneDX",
            "timeball",
            __version__,
        )
