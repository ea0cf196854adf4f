"""The sentence for a package that is not there, and what is none. Commands without it: tests/client/test_light.py."""

import pytest

from timeball.cli.options import SPARK, is_third_party, not_installed
from timeball.cli.output import ExitCode, explain


def test_the_extra_is_named_as_pip_wants_it() -> None:
    error = not_installed(ModuleNotFoundError("No module named 'pyspark'", name="pyspark"), SPARK)
    assert str(error) == (
        "pyspark is not installed: install the extra, in a checkout of Timeball pip install '.[spark]', of a wheel "
        "pip install 'FILE.whl[spark]'"
    )


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("deltalake", True),
        ("google.protobuf", True),
        ("timeball.node.node", False),
        ("sqlite3", False),
        (None, False),
    ],
)
def test_a_module_of_ours_or_of_python_is_no_package_to_install(name: str | None, others: bool) -> None:
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    assert is_third_party(error) is others
    assert explain(error)[1] == (ExitCode.SETUP if others else ExitCode.FAULT)
