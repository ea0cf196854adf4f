"""Write the two distributions of a release as two projects: `python3 -m deploy.distributions FOLDER`.

    FOLDER/timeball         the distribution `timeball`: the client, with the modules that it imports
    FOLDER/timeball-broker  the distribution `timeball-broker`: all other modules

Both install into the import package `timeball` and have no file in common. The extras belong to `timeball`. The extra
`cli` requires `timeball-broker` of the same version. Each extra that needs other packages of Timeball contains `cli`,
or is used with one that does.

A checkout stays one project with all packages, so development needs none of this. An application installs the client
alone from FOLDER/timeball. It needs no package beside Python.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CLIENT, BROKER = "timeball", "timeball-broker"
# Of src/timeball, in the client's distribution.
CLIENT_FILES = ("__init__.py", "__main__.py", "py.typed", "client", "io", "model")
# Of these, what no module of the client imports.
BROKER_FILES = (
    "io/cycle_collection.py", "io/files.py", "io/security.py", "io/threads.py", "model/access.py",
    "model/addresses.py", "model/config.py", "model/flatbuffer.py", "model/key_hash.py", "model/storage_uris.py",
)  # fmt: skip
# What a build makes in a checkout.
BUILT = shutil.ignore_patterns("__pycache__", "*.so", "_generated", "*.egg-info")


def main(arguments: list[str]) -> None:
    """Write both projects of this checkout into a new folder."""
    if len(arguments) != 1 or Path(arguments[0]).exists():
        sys.exit("name one folder, which does not exist: python3 -m deploy.distributions FOLDER")
    for project in write_projects(Path(__file__).parents[1], Path(arguments[0])):
        print(project)


def write_projects(checkout: Path, out: Path) -> tuple[Path, Path]:
    """Write both projects. Returns the folders of the client and of the broker. They must not exist."""
    settings = tomllib.loads((checkout / "pyproject.toml").read_text("utf-8"))
    client, broker = out / CLIENT, out / BROKER
    shutil.copytree(checkout / "src", broker / "src", ignore=BUILT)
    for name in CLIENT_FILES:
        target = client / "src/timeball" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (broker / "src/timeball" / name).rename(target)
    for name in BROKER_FILES:
        target = broker / "src/timeball" / name
        target.parent.mkdir(exist_ok=True)
        (client / "src/timeball" / name).rename(target)
    # Cython finds the names of modules by it. setuptools does not install it, as `timeball` is not among the packages.
    shutil.copy(client / "src/timeball/__init__.py", broker / "src/timeball/__init__.py")
    (broker / "MANIFEST.in").write_text("include src/timeball/__init__.py\n")
    shutil.copy(checkout / "setup.py", broker)
    for project, written in ((client, client_settings(settings)), (broker, broker_settings(settings))):
        for name in ("README.md", "LICENSE"):
            shutil.copy(checkout / name, project)
        (project / "pyproject.toml").write_text(toml(written))
    return client, broker


def client_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Build the pyproject.toml of the client from that of the checkout."""
    project, setuptools = dict(settings["project"]), settings["tool"]["setuptools"]
    del project["entry-points"]  # of pytest: its fixtures need the broker
    extras = project["optional-dependencies"]
    extras = {**extras, "cli": [f"{BROKER}=={project['version']}", *extras["cli"]]}
    del extras["dev"]
    return {
        "build-system": {"requires": ["setuptools>=77"], "build-backend": "setuptools.build_meta"},
        "project": {**project, "optional-dependencies": extras},
        "tool": {"setuptools": setuptools},
    }


def broker_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Build the pyproject.toml of the broker from that of the checkout."""
    project, setuptools = dict(settings["project"]), settings["tool"]["setuptools"]
    del project["optional-dependencies"], project["scripts"]
    project |= {
        "name": BROKER,
        "description": "The broker and the command line of Timeball: install timeball[broker] or timeball[cli].",
        "dependencies": [f"{CLIENT}=={project['version']}"],
    }
    packages = {"find": {"where": ["src"], "exclude": [CLIENT]}}
    return {
        "build-system": settings["build-system"],
        "project": project,
        "tool": {"setuptools": {**setuptools, "packages": packages}},
    }


def toml(table: Mapping[str, Any], name: str = "") -> str:
    """Encode a table of texts, lists and tables in TOML, whose texts and lists are those of JSON."""
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    text = f"[{name}]\n" if values else ""
    text += "".join(f"{toml_key(key)} = {toml_value(value)}\n" for key, value in values.items())
    for key, value in table.items():
        if isinstance(value, dict):
            text += toml(value, f"{name}.{toml_key(key)}".removeprefix("."))
    return text


def toml_key(key: str) -> str:
    """Encode a key."""
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def toml_value(value: object) -> str:
    """Encode a text, a list, or a table in a list."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{toml_key(key)} = {toml_value(each)}' for key, each in value.items())} }}"
    return json.dumps(value)


if __name__ == "__main__":
    main(sys.argv[1:])
