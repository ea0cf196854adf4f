#!/usr/bin/env bash
# Version: grpcio 1.85.1.
# Guess: with grpc.keepalive_time_ms and grpc.keepalive_timeout_ms of a second, a call to a peer that has stopped ends after about two seconds.
# Seen: it ends after 61 s, "ping timeout". grpc.http2.ping_timeout_ms decides, and is a minute by default. With this at a second, too, the call ends in time.
# For scheduled messages: a long stream of sends has no deadline. Set all three, or a machine that is lost holds the sender for a minute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grpcio==1.85.1

cd "$folder"
cat >server.py <<'PYTHON'
from concurrent import futures

import grpc

echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server = grpc.server(
    futures.ThreadPoolExecutor(2), options=[("grpc.http2.min_recv_ping_interval_without_data_ms", 100)]
)
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", {"echo": echo}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
PYTHON
"$folder/venv/bin/python" - <<'PYTHON'
import os
import signal
import subprocess
import sys
import time

import grpc


def seconds_until_the_error(options: list[tuple[str, int]]) -> float:
    server = subprocess.Popen([sys.executable, "server.py"], stdout=subprocess.PIPE, text=True)
    try:
        address = f"127.0.0.1:{server.stdout.readline().strip()}"
        with grpc.insecure_channel(address, options=options) as channel:
            echo = channel.unary_unary("/s/echo")
            echo(b"x", timeout=10)
            os.kill(server.pid, signal.SIGSTOP)
            begun_s = time.monotonic()
            try:
                echo(b"x", timeout=120)
            except grpc.RpcError:
                return time.monotonic() - begun_s
            sys.exit("a stopped server answered")
    finally:
        server.kill()


keepalive = [("grpc.keepalive_time_ms", 1_000), ("grpc.keepalive_timeout_ms", 1_000)]
without, with_ping_timeout = (
    seconds_until_the_error(options) for options in (keepalive, [*keepalive, ("grpc.http2.ping_timeout_ms", 1_000)])
)
print(f"keepalive of 1 s + 1 s: {without:.0f} s; with a ping timeout of 1 s: {with_ping_timeout:.0f} s")
if not (without > 30 and with_ping_timeout < 15):
    sys.exit("the behaviour has changed")
PYTHON
