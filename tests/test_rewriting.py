"""A process that compiles test files writes the files that pytest reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from tests.rewriting import compile_files, compiled_file


def test_compiled_tests_are_read_by_pytest(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "test_one.py"
    path.write_text("def test_one():\n    assert 1 == 1\n")
    assert rewrite._read_pyc(path, compiled_file(path)) is None
    compile_files([path], request.config)
    code = rewrite._read_pyc(path, compiled_file(path))
    assert code is not None and "@pytest_ar" in code.co_names
    os.utime(path, (1, 1))
    assert (
        rewrite._read_pyc(path, compiled_file(path)) is None
    )  # the control: a file with another time counts as changed


def test_kept_files_are_not_compiled_again(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "test_one.py"
    path.write_text("assert True\n")
    compiled_file(path).parent.mkdir()
    compiled_file(path).write_bytes(b"kept")
    compile_files([path], request.config)
    assert compiled_file(path).read_bytes() == b"kept"
