"""Storage URIs of tables and files: converts a URI to the file systems and options of Arrow, delta-rs and Spark.

A *storage URI* is a folder's path or a URI with the scheme `file`, `s3` (Hadoop's `s3a` means the same), or another
scheme of the libraries: `gs`, `abfss`, `hdfs`. Only this module interprets them. All other code passes them on
unchanged.

Environment variables configure the access to S3, under the names that Amazon's tools use. They also reach the workers
of Spark. No URI contains a key, because URIs appear in logs and statuses.

    AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL       a server that is not Amazon's
    AWS_REGION, AWS_DEFAULT_REGION              us-east-1 if there is only an endpoint
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
_ARROW_NAMES = {
    "AWS_ACCESS_KEY_ID": "access_key",
    "AWS_SECRET_ACCESS_KEY": "secret_key",
    "AWS_SESSION_TOKEN": "session_token",
}
# With these timeouts, a store that does not answer causes an error within a minute. Without them a task would hang.
_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 20.0


def in_object_store(uri: str) -> bool:
    """Check whether a storage URI is in an object store."""
    return _scheme(uri) in OBJECT_STORES


def arrow(uri: str, environment: Mapping[str, str] = os.environ) -> tuple[fs.FileSystem, str]:
    """Open Arrow's file system for a storage URI. Returns it, and the path in it.

    Raises SetupError if Arrow cannot reach the URI.
    """
    try:
        if _scheme(uri) in S3_SCHEMES:
            return fs.S3FileSystem(**_arrow_options(environment)), _s3_path(uri)
        result: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(
            uri if ":" in uri else os.path.abspath(uri)
        )
    except (pa.ArrowException, OSError) as error:
        raise SetupError(f"{uri}: not a storage URI that Arrow can reach: {error}") from error
    return result


def arrow_all(
    uris: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[fs.FileSystem, list[str]]:
    """Open Arrow's file system for one or more storage URIs of one scheme. Returns it, and the path of each URI.

    Raises SetupError as `arrow`.
    """
    files, first = arrow(uris[0], environment)
    if _scheme(uris[0]) in S3_SCHEMES:
        return files, [_s3_path(uri) for uri in uris]
    return files, [first, *(arrow(uri, environment)[1] for uri in uris[1:])]


def delta(uri: str, environment: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str] | None]:
    """Convert the storage URI of a table to the arguments of delta-rs: its URI, and `storage_options`.

    On S3, delta-rs commits with a conditional put. The store refuses the second of two commits of the same version, so
    no lock service is needed. Raises SetupError for a URI of S3 with more than bucket and path.
    """
    if _scheme(uri) not in S3_SCHEMES:
        return uri, None
    options = {name: environment[name] for name in _ARROW_NAMES if environment.get(name)}
    if region := _region(environment):
        options["AWS_REGION"] = region
    if endpoint := _endpoint(environment):
        options |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": str(endpoint.startswith("http://")).lower(),
        }
    return f"s3://{_s3_path(uri)}", options


def spark_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Build Spark settings by which its own checkpoints reach the same S3. Spark needs the jar `hadoop-aws` for that.

    The settings contain no keys, because Spark's web UI shows them. Hadoop finds the keys in the environment.
    """
    prefix, settings = "spark.hadoop.fs.s3a", dict[str, str]()
    if region := _region(environment):
        settings[f"{prefix}.endpoint.region"] = region
    if endpoint := _endpoint(environment):
        settings[f"{prefix}.endpoint"] = endpoint
        settings[f"{prefix}.path.style.access"] = "true"
    return settings


def _arrow_options(environment: Mapping[str, str]) -> dict[str, object]:
    """Build the options of pyarrow's S3FileSystem from the variables of the AWS tools."""
    options: dict[str, object] = {
        option: environment[name] for name, option in _ARROW_NAMES.items() if environment.get(name)
    }
    if region := _region(environment):
        options["region"] = region
    if endpoint := _endpoint(environment):
        scheme, _, address = endpoint.partition("://")
        options |= {"endpoint_override": address.rstrip("/"), "scheme": scheme}
    # With this option one request writes a small file instead of three, so the file exists completely or not at all.
    options["allow_delayed_open"] = True
    return options | {"connect_timeout": _CONNECT_TIMEOUT_S, "request_timeout": _REQUEST_TIMEOUT_S}


def _endpoint(environment: Mapping[str, str]) -> str | None:
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise SetupError(f"AWS_ENDPOINT_URL {endpoint}: write http://host:port or https://host:port")
    return endpoint or None


def _region(environment: Mapping[str, str]) -> str | None:
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    return region or (DEFAULT_REGION if _endpoint(environment) else None)


def _s3_path(uri: str) -> str:
    """Extract bucket/key from a URI. Raises SetupError if the URI contains credentials or parameters."""
    path = uri.partition("://")[2].strip("/")
    bucket = path.partition("/")[0]
    if not bucket or "@" in bucket or "?" in path:
        # The error does not contain the URI, because the wrong part may be a secret key.
        raise SetupError("a URI of S3 is only s3://bucket/path: set keys and endpoint by the AWS_… variables")
    return path


def _scheme(uri: str) -> str:
    scheme, separator, _ = uri.partition("://")
    return scheme.lower() if separator else ""
