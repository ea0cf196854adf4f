"""`make cluster`: three nodes and three members of etcd on this machine, from one command; Ctrl-C ends all."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from examples.cluster.machines import CLUSTER, NAMES, LocalCluster, local_cluster

from timeball.cli.output import ExitCode, explain

LOOK_S = 0.5
EPILOG = """\
examples:
  make cluster
  make cluster ARGS='--data ./cluster-data'    # keeps the data, for the next time
  make cluster ARGS=--any-ports                # where the usual ports are taken
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cluster until Ctrl-C and return an exit code."""
    options = _parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with _folder(options.data) as folder, local_cluster(folder, any_ports=options.any_ports) as cluster:
            print("\n".join(_lines(cluster)), flush=True)
            _watch(cluster)
    except KeyboardInterrupt:
        print("cluster: ended", file=sys.stderr)
    except Exception as error:  # the end of the line: a person reads a sentence, a script a code
        sentence, code = explain(error)
        print(f"cluster: {sentence}", file=sys.stderr)
        return code
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make cluster", description="Run three nodes of Timeball and three members of etcd on this machine.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="keep data and logs in this folder")
    parser.add_argument("--any-ports", action="store_true", help="let the system choose all ports")
    return parser


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="timeball-cluster-") as folder:
        yield Path(folder)


def _lines(cluster: LocalCluster) -> Iterator[str]:
    """Yield where everything is, and what to try."""
    etcd = ",".join(cluster.endpoints)
    yield f"etcd    {etcd}"
    for name in NAMES:
        process = cluster.nodes[name].process
        assert process is not None
        name_server = cluster.url(name, "--name-server-port").removeprefix("http://")
        yield (
            f"node {name}  {cluster.url(name, '--port', 'grpc')}  {cluster.url(name, '--http-port')}  "
            f"RocketMQ name server {name_server}  pid {process.pid}"
        )
    yield f"leader  {cluster.leader()}, logs in {cluster.folder}"
    yield "In another terminal:"
    yield f"  export TIMEBALL_CLUSTER={CLUSTER} TIMEBALL_ETCD={etcd}"
    yield f"  export TIMEBALL_ENDPOINT={cluster.http_endpoint} TIMEBALL_FLIGHT={cluster.endpoint}"
    timeball = os.path.relpath(Path(sys.executable).with_name("timeball"))
    yield f"  {timeball} cluster status"
    yield f"  {timeball} schedule orders 'hello' --after 10s && {timeball} pull orders --follow"
    yield f"  {timeball} cluster hand-over    # or kill -9 a pid: it is started again after 3 s"
    yield "Ctrl-C ends all."


def _watch(cluster: LocalCluster) -> None:
    """Start again what ends, and tell who leads, until interrupted."""
    leader = cluster.leader()
    while True:
        time.sleep(LOOK_S)
        for name in cluster.start_ended_again():
            print(f"node {name} had ended, and is started again", flush=True)
        now = cluster.leader()
        if now and now != leader:
            print(f"leader  {now}", flush=True)
            leader = now


if __name__ == "__main__":
    sys.exit(main())
