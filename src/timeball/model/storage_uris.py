"""Locations of tables and files: converts a URI to the file systems and options of Arrow, delta-rs and Spark.

A *place* is a folder's path or a URI with the scheme `file`, `s3` (Hadoop's `s3a` means the same), or another scheme of
the libraries: `gs`, `abfss`, `hdfs`. Only this module interprets places. All other code passes them on unchanged.

The access to S3 is configured by environment variables, under the names that Amazon's tools use. So it also works in
the workers of Spark, and no URI contains a key: URIs appear in logs and statuses.

    AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL       a server that is not Amazon's
    AWS_REGION, AWS_DEFAULT_REGION              us-east-1 where only an endpoint is named
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY    without them each library looks for a role or a profile by itself
    AWS_SESSION_TOKEN
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.fs as fs

from timeball.model.errors import SetupError

S3_SCHEMES = ("s3", "s3a")
DEFAULT_REGION = "us-east-1"
# Object stores have keys, but no folders. Spark needs a jar for each kind of store, which its package does not contain.
OBJECT_STORES = (*S3_SCHEMES, "gs", "gcs", "abfs", "abfss", "az")
# Amazon's name -> Arrow's name. delta-rs uses Amazon's names.
_KEYS = {
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "session_token",
}
# With these timeouts, a store that does not answer causes an error within a minute, so that no task hangs.
_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 20.0


def in_object_store(place: str) -> bool:
    """Check whether a place is in an object store."""
    return _scheme(place) in OBJECT_STORES


def arrow(place: str, environment: Mapping[str, str] = os.environ) -> tuple[fs.FileSystem, str]:
    """Return Arrow's file system for a place, and the path in it. Raises SetupError if Arrow cannot reach the place."""
    try:
        if _scheme(place) in S3_SCHEMES:
            return fs.S3FileSystem(**_arrow_options(environment)), _s3_path(place)
        found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(
            place if ":" in place else os.path.abspath(place)
        )
    except (pa.ArrowException, OSError) as error:
        raise SetupError(f"{place}: not a place that Arrow can reach: {error}") from error
    return found


def arrow_all(
    places: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[fs.FileSystem, list[str]]:
    """Return Arrow's file system for places, and the path of each. `places` is not empty and has one scheme."""
    files, first = arrow(places[0], environment)
    if _scheme(places[0]) in S3_SCHEMES:
        return files, [_s3_path(place) for place in places]
    return files, [first, *(arrow(place, environment)[1] for place in places[1:])]


def delta(place: str, environment: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str] | None]:
    """Return the URI of a table in delta-rs's form, and its `storage_options`.

    On S3, delta-rs commits with a conditional put: the store refuses the second of two commits of one version, so no
    lock service is needed.
    """
    if _scheme(place) not in S3_SCHEMES:
        return place, None
    options = {name: environment[name] for name in _KEYS if environment.get(name)}
    if region := _region(environment):
        options["AWS_REGION"] = region
    if endpoint := _endpoint(environment):
        options |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": str(endpoint.startswith("http://")).lower(),
        }
    return f"s3://{_s3_path(place)}", options


def spark_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings with which Spark's own checkpoints reach the same S3, if Spark has the jar `hadoop-aws`.

    They contain no keys, because Spark's web UI shows settings. Hadoop finds the keys in the environment.
    """
    prefix, settings = "spark.hadoop.fs.s3a", dict[str, str]()
    if region := _region(environment):
        settings[f"{prefix}.endpoint.region"] = region
    if endpoint := _endpoint(environment):
        settings[f"{prefix}.endpoint"] = endpoint
        settings[f"{prefix}.path.style.access"] = "true"
    return settings


def _arrow_options(environment: Mapping[str, str]) -> dict[str, object]:
    options: dict[str, object] = {
        option: environment[name] for name, option in _KEYS.items() if environment.get(name)
    }
    if region := _region(environment):
        options["region"] = region
    if endpoint := _endpoint(environment):
        scheme, _, address = endpoint.partition("://")
        options |= {"endpoint_override": address.rstrip("/"), "scheme": scheme}
    # With this, a small file is written by one request instead of three, and so exists completely or not at all.
    options["allow_delayed_open"] = True
    return options | {"connect_timeout": _CONNECT_TIMEOUT_S, "request_timeout": _REQUEST_TIMEOUT_S}


def _endpoint(environment: Mapping[str, str]) -> str | None:
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise SetupError(f"AWS_ENDPOINT_URL {endpoint}: write http://host:port or https://host:port")
    return endpoint or None


def _region(environment: Mapping[str, str]) -> str | None:
    named = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return named or (DEFAULT_REGION if _endpoint(environment) else None)


def _s3_path(place: str) -> str:
    """Return bucket/key. Raises SetupError for a URI that contains credentials or parameters."""
    path = place.partition("://")[2].strip("/")
    bucket = path.partition("/")[0]
    if not bucket or "@" in bucket or "?" in path:
        # The error does not contain the URI, because the wrong part may be a secret key.
        raise SetupError("an s3 place is s3://bucket/path alone: keys and endpoint stand in AWS_… variables")
    return path


def _scheme(place: str) -> str:
    scheme, separator, _ = place.partition("://")
    return scheme.lower() if separator else ""
