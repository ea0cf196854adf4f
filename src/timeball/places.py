"""Where tables and files lie: what Arrow, delta-rs and Spark each want to be told about one place.

The only module that knows. A place is a folder, or a URI: `file`, `s3` (Hadoop's `s3a` means the same), or what the
libraries know besides: `gs`, `abfss`, `hdfs`. The rest of the package hands URIs on as they are.

How S3 is reached stands in the environment, under the names that Amazon's own tools use; so it reaches the workers of
Spark as well, and no key stands in a URI, which goes into logs and statuses:

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

from timeball.errors import SetupError

S3_SCHEMES = ("s3", "s3a")
DEFAULT_REGION = "us-east-1"
# An object store has keys and no folders. Spark needs a jar for each, which its package lacks.
OBJECT_STORES = (*S3_SCHEMES, "gs", "gcs", "abfs", "abfss", "az")
# Amazon's name -> Arrow's; delta-rs takes Amazon's.
_KEYS = {
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "session_token",
}
# A store that does not answer is an error within a minute, not a task that hangs.
_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 20.0


def in_object_store(place: str) -> bool:
    """Return whether a place is in an object store."""
    return _scheme(place) in OBJECT_STORES


def arrow(place: str, environment: Mapping[str, str] = os.environ) -> tuple[fs.FileSystem, str]:
    """Return Arrow's file system for a place, and the path there; SetupError when Arrow cannot reach such a place."""
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
    """Return Arrow's file system for places of one kind, at least one, and the path of each."""
    files, first = arrow(places[0], environment)
    if _scheme(places[0]) in S3_SCHEMES:
        return files, [_s3_path(place) for place in places]
    return files, [first, *(arrow(place, environment)[1] for place in places[1:])]


def delta(place: str, environment: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str] | None]:
    """Return the URI of a table as delta-rs wants it, and its `storage_options`.

    delta-rs commits with a conditional put where the place is S3: the store refuses the second of two commits of one
    version, so no lock service is needed.
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
    """Return the settings by which Spark's own checkpoints reach the same S3, if Spark is given `hadoop-aws`.

    Without the keys: Hadoop finds them in the environment, and settings are shown in Spark's pages.
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
    # A small file is one request, and is there whole or not at all; without this it is three.
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
    """Return bucket/key; SetupError for a URI that says how the store is reached."""
    path = place.partition("://")[2].strip("/")
    bucket = path.partition("/")[0]
    if not bucket or "@" in bucket or "?" in path:
        # Not the URI itself: what is wrong with it may be a key.
        raise SetupError("an s3 place is s3://bucket/path alone: keys and endpoint stand in AWS_… variables")
    return path


def _scheme(place: str) -> str:
    scheme, separator, _ = place.partition("://")
    return scheme.lower() if separator else ""
