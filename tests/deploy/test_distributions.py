"""The two projects of a release: no file is in both, together they are the package, and the client runs alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deploy.distributions import toml, write_projects
from tests.cli.processes import environment
from tests.client.test_light import CLIENT, COLUMNS, run
from tests.docs_pages import ROOT
from tests.node_fixture import running_node

from timeball import __version__
from timeball.model.errors import not_installed_text

IMPORTS = """
import importlib, json, sys

for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name, error)
"""

IMPORTED = """
import importlib, json, pkgutil, sys

import timeball.client

for found in pkgutil.walk_packages(timeball.client.__path__, "timeball.client."):
    importlib.import_module(found.name)
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "timeball"]))
"""


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_projects(ROOT, tmp_path_factory.mktemp("projects"))


def files(project: Path) -> set[str]:
    """Return the source files of a project, without those that a build makes."""
    found = [path for path in (project / "src/timeball").rglob("*") if path.is_file()]
    return {
        path.relative_to(project).as_posix()
        for path in found
        if path.suffix not in (".pyc", ".so") and "_generated" not in path.parts
    }


def test_each_file_is_in_one_of_them(projects: tuple[Path, Path]) -> None:
    client, broker = map(files, projects)
    assert client | broker == files(ROOT)
    # Which Cython looks at. It is in no wheel of the broker: tests/test_wheel.py.
    assert client & broker == {"src/timeball/__init__.py"}


def test_the_client_needs_no_other_package(projects: tuple[Path, Path], tmp_path: Path) -> None:
    alone = str(projects[0] / "src")
    with running_node(tmp_path / "data") as node:
        ran = run(CLIENT, node.http_endpoint, PYTHONPATH=alone)
        assert ran.stdout.splitlines() == ["True visible", "cancelled"], ran.stderr
        ran = run(COLUMNS, node.http_endpoint, node.endpoint, extras=["arrow"], PYTHONPATH=alone)
        assert ran.stdout.splitlines() == ["2 [b'x', b'y']"], ran.stderr


def test_the_client_has_the_modules_that_it_imports_and_no_others(projects: tuple[Path, Path]) -> None:
    client = projects[0] / "src"
    there = {
        ".".join(path.relative_to(client).with_suffix("").parts).removesuffix(".__init__")
        for path in client.rglob("*.py")
    }
    command = [sys.executable, "-P", "-c", IMPORTED]
    ran = subprocess.run(command, env=environment(PYTHONPATH=str(client)), capture_output=True, check=True)
    assert set(json.loads(ran.stdout)) == there - {"timeball.__main__"}


def test_the_import_of_a_missing_package_names_the_extra(projects: tuple[Path, Path]) -> None:
    client, broker = projects
    packages = [path.parent.name for path in (broker / "src/timeball").glob("*/__init__.py")]
    names = [f"timeball.{package}" for package in sorted(packages)]
    assert len(names) == 12
    others = ["timeball.client.gone", "cli", "timeball.testing.pytest_plugin"]
    ran = run(IMPORTS, json.dumps([*names, *others]), PYTHONPATH=str(client / "src"))
    extras = {"timeball.cli": "cli", "timeball.spark": "spark"}
    assert ran.stdout.splitlines() == [
        *(f"{name} {not_installed_text(name, extras.get(name, 'broker'))}" for name in names),
        "timeball.client.gone No module named 'timeball.client.gone'",
        "cli No module named 'cli'",
        f"timeball.testing {not_installed_text('timeball.testing', 'broker')}",
    ], ran.stderr
    ran = run("from timeball import testing", PYTHONPATH=str(client / "src"))
    assert ran.stderr.endswith(f"ModuleNotFoundError: {not_installed_text('timeball.testing', 'broker')}\n")
    ran = run(IMPORTS, json.dumps(["timeball.model", "timeball.broker.gone"]))
    assert ran.stdout == "timeball.broker.gone No module named 'timeball.broker.gone'\n", "the control"


def test_the_broker_requires_the_client_of_its_version_and_the_extras_require_the_broker(
    projects: tuple[Path, Path],
) -> None:
    client, broker = (tomllib.loads((each / "pyproject.toml").read_text())["project"] for each in projects)
    assert (broker["name"], broker["version"], broker["dependencies"]) == (
        "timeball-broker", __version__, [f"timeball=={__version__}"],
    )  # fmt: skip
    assert "optional-dependencies" not in broker and "scripts" not in broker
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = whole["optional-dependencies"]
    del extras["dev"]
    assert client["dependencies"] == whole["dependencies"] and client["scripts"] == whole["scripts"]
    assert broker["entry-points"] == whole["entry-points"] and "entry-points" not in client
    assert client["optional-dependencies"].pop("cli") == [
        f"timeball-broker=={__version__}",
        *extras.pop("cli"),
    ]
    assert client["optional-dependencies"] == extras
    # The others are for programs that only have the client, or come with `broker`.
    of_cli = {name for name, lines in extras.items() if "timeball[cli]" in lines}
    assert of_cli == {"broker", "spark", "kafka"}


def test_tables_are_written_as_they_are_read() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name in ("project", "build-system", "dependency-groups"):
        table = {name: tomllib.loads(text)[name]}
        assert tomllib.loads(toml(table)) == table
    strange = {"a": {"b.c": {"*": ['"é\n\\'], "d": [{"e f": True}]}}}
    assert tomllib.loads(toml(strange)) == strange
