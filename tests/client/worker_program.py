"""A program that runs a worker until SIGTERM: `worker_program.py ENDPOINT TOPIC`."""

import sys

from timeball import Message, Timeball, Worker


def handler(message: Message) -> None:
    """Print that the message is processed, wait for a line of standard input, and then for SIGTERM."""
    print("handling", flush=True)
    sys.stdin.readline()
    worker._stopping.wait()  # run() has installed the handler of the signal, which sets this event


with Timeball(sys.argv[1]) as ball:
    worker = Worker(ball, "g", sys.argv[2], handler, lease="10m")
    worker.run()
    print("acknowledged", worker.counts.acknowledged, flush=True)
