"""Storage URIs become the arguments of each library, and only storage_uris.py interprets them."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow.fs as fs
import pytest

from timeball.model import storage_uris
from timeball.model.errors import SetupError

SOURCE = Path(storage_uris.__file__).parents[1]
OWN_SERVER = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
    "AWS_ACCESS_KEY_ID": "name",
    "AWS_SECRET_ACCESS_KEY": "secret",
}
# Code that gives a library a storage URI, which only these modules may contain.
_URI_CODE = re.compile(r"from_uri\(|S3FileSystem|\bDeltaTable\(|\bDeltaTable\.create\(|AWS_|fs\.s3a")
_ALLOWED_MODULES = ("model/storage_uris.py", "spark/table_store.py", "table/delta_rs.py")


def test_the_uri_of_a_folder_stays_unchanged(tmp_path: Path) -> None:
    for uri in (str(tmp_path), tmp_path.as_uri()):
        files, path = storage_uris.arrow(uri, {})
        assert isinstance(files, fs.LocalFileSystem) and path == str(tmp_path)
        assert storage_uris.delta(uri, OWN_SERVER) == (uri, None)
        assert not storage_uris.in_object_store(uri)


def test_a_relative_folder_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_uris.arrow("here", {})[1] == str(tmp_path / "here")


@pytest.mark.parametrize("scheme", ["s3", "s3a", "S3"])
def test_s3_uris_with_each_scheme_have_the_same_path_and_options(scheme: str) -> None:
    uri = f"{scheme}://ships/data/ledger/"
    files, path = storage_uris.arrow(uri, OWN_SERVER)
    assert isinstance(files, fs.S3FileSystem) and path == "ships/data/ledger"
    assert files.region == storage_uris.DEFAULT_REGION
    assert storage_uris.delta(uri, OWN_SERVER) == (
        "s3://ships/data/ledger",
        {
            "AWS_ACCESS_KEY_ID": "name",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
            "AWS_ALLOW_HTTP": "true",
        },
    )
    assert storage_uris.in_object_store(uri)


def test_uris_of_one_scheme_share_a_file_system() -> None:
    files, paths = storage_uris.arrow_all(["s3://ships/a", "s3a://ships/b"], OWN_SERVER)
    assert isinstance(files, fs.S3FileSystem) and paths == ["ships/a", "ships/b"]
    files, paths = storage_uris.arrow_all(["/a", "file:///b"], {})
    assert isinstance(files, fs.LocalFileSystem) and paths == ["/a", "/b"]


def test_the_endpoint_of_s3_wins_over_that_of_all_services() -> None:
    environment = OWN_SERVER | {
        "AWS_ENDPOINT_URL_S3": "https://s3.example",
        "AWS_DEFAULT_REGION": "eu-north-1",
        "AWS_SESSION_TOKEN": "token",
    }
    _, options = storage_uris.delta("s3://ships/x", environment)
    assert options is not None
    assert options["AWS_ENDPOINT_URL"] == "https://s3.example" and options["AWS_ALLOW_HTTP"] == "false"
    assert options["AWS_REGION"] == "eu-north-1" and options["AWS_SESSION_TOKEN"] == "token"


def test_spark_settings_contain_no_access_key() -> None:
    assert storage_uris.spark_settings({}) == {}
    assert storage_uris.spark_settings(OWN_SERVER) == {
        "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:9000",
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
    }


@pytest.mark.parametrize("uri", ["s3://name:secret@ships/x", "s3://ships/x?region=a", "s3://"])
def test_keys_and_options_in_a_uri_are_refused_and_not_in_the_error(uri: str) -> None:
    for convert in (storage_uris.arrow, storage_uris.delta):
        with pytest.raises(SetupError, match="only s3://bucket/path") as caught:
            convert(uri, OWN_SERVER)
        assert "secret" not in str(caught.value)


def test_an_unsupported_uri_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match="nosuch://place: not a storage URI"):
        storage_uris.arrow("nosuch://place", {})
    with pytest.raises(SetupError, match=r"AWS_ENDPOINT_URL 127\.0\.0\.1:9000: write http://"):
        storage_uris.delta("s3://ships/x", {"AWS_ENDPOINT_URL": "127.0.0.1:9000"})


def test_no_other_module_gives_a_library_a_storage_uri() -> None:
    violations = [
        f"{path.relative_to(SOURCE)}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        if str(path.relative_to(SOURCE)) not in _ALLOWED_MODULES
        and (match := _URI_CODE.search(path.read_text()))
    ]
    assert violations == []


def test_a_module_that_tells_a_library_itself_is_noticed() -> None:
    """The control of the test above."""
    for line in ("fs.FileSystem.from_uri(uri)", "DeltaTable(uri, version=3)", 'os.environ["AWS_REGION"]'):
        assert _URI_CODE.search(line)
    assert not _URI_CODE.search("table: DeltaTable) -> None")
