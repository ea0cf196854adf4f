"""Documents: what comes back is what was saved, or Corrupt with the file's name."""

from __future__ import annotations

import json

import pytest
from tests.crash_files import CrashFiles

from timeball import documents
from timeball.errors import Corrupt

VALUE = {"orders": {"queues": 8, "deleted": False}}
KIND = dict[str, dict[str, int]]


def test_a_document_comes_back_and_one_that_is_not_there_is_none() -> None:
    files = CrashFiles()
    assert documents.load(files, "topics.json", KIND) is None
    files.replace("topics.json", documents.encode({"orders": {"queues": 8}}))
    assert documents.load(files, "topics.json", KIND) == {"orders": {"queues": 8}}


def test_a_person_and_jq_read_it() -> None:
    first, content = documents.encode(VALUE).splitlines()
    assert json.loads(content) == VALUE
    assert json.loads(first)["bytes"] == len(content)


def test_every_flipped_bit_and_every_length_is_noticed() -> None:
    whole = documents.encode(VALUE)
    wrong = [whole[:size] for size in range(len(whole))] + [whole + b"\n", whole[1:]]
    for at in range(len(whole)):
        for bit in range(8):
            wrong.append(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    for data in wrong:
        with pytest.raises(Corrupt, match=r"offsets\.json does not match its checksum"):
            documents.decode("offsets.json", data, dict)


def test_content_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(Corrupt, match=r"groups\.json: Expected"):
        documents.decode("groups.json", documents.encode([1]), KIND)
