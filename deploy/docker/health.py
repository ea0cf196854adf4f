"""The health check of the image: exit code 0 when the broker takes messages. It imports no package, to be quick.

It runs inside of the container and asks loopback. A certificate is taken as it is: it names what clients dial.
"""

import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

TIMEOUT_S = 4


def answer(environment: Mapping[str, str]) -> str:
    """Return what /health/ready says; raises OSError when it says no, or nothing."""
    port, scheme, context = environment.get("TIMEBALL_HTTP_PORT", "7480"), "http", None
    if environment.get("TIMEBALL_TLS_CERT"):
        scheme, context = "https", ssl._create_unverified_context()
    # No proxy: what stands in http_proxy does not know this container's loopback.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(f"{scheme}://127.0.0.1:{port}/health/ready", timeout=TIMEOUT_S) as found:
        return str(found.read().decode())


if __name__ == "__main__":
    try:
        print(answer(os.environ))
    except urllib.error.HTTPError as error:
        sys.exit(f"not ready: {error.read().decode()}")
    except OSError as error:
        sys.exit(f"no answer: {error}")
