"""One send stream, driven by hand: a bounded number of batches in flight, and the time of each answer.

The client's `send_many` hides this; a benchmark of acknowledgement latency needs to see it.
"""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight


def drive(
    endpoint: str, batches: list[pa.RecordBatch], in_flight: int
) -> tuple[npt.NDArray[np.float64], float]:
    """Send all batches with at most `in_flight` unanswered; (latency of each in ms, seconds for all)."""
    client = flight.FlightClient(endpoint.replace("grpc://", "grpc+tcp://", 1))
    descriptor = flight.FlightDescriptor.for_path(b"send")
    writer, reader = client.do_exchange(descriptor)
    sent = np.zeros(len(batches))
    answered = np.zeros(len(batches))
    room = threading.Semaphore(in_flight)
    failures: list[BaseException] = []

    def listen() -> None:
        try:
            for number in range(len(batches)):
                answer = json.loads(reader.read_chunk().app_metadata.to_pybytes())
                answered[number] = time.perf_counter()
                if "error" in answer:
                    raise RuntimeError(answer["text"])
                room.release()
        except BaseException as error:  # the thread's failure is raised by the caller below
            failures.append(error)
            room.release(len(batches))

    writer.begin(batches[0].schema)
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    begun = time.perf_counter()
    for number, batch in enumerate(batches):
        room.acquire()
        if failures:
            break
        sent[number] = time.perf_counter()
        writer.write_batch(batch)
    writer.done_writing()
    listening.join(120)
    client.close()
    if failures:
        raise failures[0]
    return (answered - sent) * 1000, float(answered[-1] - begun)
