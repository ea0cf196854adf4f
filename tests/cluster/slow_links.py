"""Links that delay each frame and lose some, as the kernel's netem does, in a process.

A link is two interfaces, one towards a machine and one towards the router (namespaces.py). Frames from the machine are
delayed, and lost by chance. Frames to it pass at once. So a round trip between two machines takes two delays. The
process runs in a namespace without addresses, so only frames that it copies get from one end to the other.

    python -m tests.cluster.slow_links HOLD_MS LOSS SEED INSIDE=OUTSIDE...

prints `ready`, and at its end, as JSON, the numbers of delayed and of lost frames.
"""

from __future__ import annotations

import json
import random
import selectors
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass

ALL_PROTOCOLS = 3  # ETH_P_ALL
FRAME_BYTES, FRAMES_AT_ONCE = 65_536, 64


@dataclass
class Counts:
    """Frames that machines have sent."""

    held: int = 0
    lost: int = 0


class SlowLinks:
    """Copies frames between the two ends of each link until it is interrupted."""

    def __init__(self, hold_s: float, loss: float, seed: int) -> None:
        self._hold_s, self._loss, self._chance = hold_s, loss, random.Random(seed)
        self._selector = selectors.DefaultSelector()
        # All delays are equal, so the frames leave in the order in which they came.
        self._held: deque[tuple[float, socket.socket, bytes]] = deque()
        self.counts = Counts()

    def add(self, inside: str, outside: str) -> None:
        """Join two interfaces."""
        ends = [self._open(name) for name in (inside, outside)]
        self._selector.register(ends[0], selectors.EVENT_READ, (ends[1], True))
        self._selector.register(ends[1], selectors.EVENT_READ, (ends[0], False))

    def run(self) -> None:
        """Copy frames for ever."""
        while True:
            wait_s = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            for key, _ in self._selector.select(wait_s):
                source: socket.socket = key.fileobj  # type: ignore[assignment]
                target, is_held = key.data
                for frame in self._read(source):
                    if is_held:
                        self._hold(target, frame)
                    else:
                        self._send(target, frame)
            now_s = time.monotonic()
            while self._held and self._held[0][0] <= now_s:
                _, target, frame = self._held.popleft()
                self._send(target, frame)

    def _hold(self, target: socket.socket, frame: bytes) -> None:
        """Lose the frame by chance, or send it after the delay."""
        if self._chance.random() < self._loss:
            self.counts.lost += 1
        else:
            self.counts.held += 1
            self._held.append((time.monotonic() + self._hold_s, target, frame))

    def _read(self, source: socket.socket) -> list[bytes]:
        """Read the frames that have arrived at an interface, at most FRAMES_AT_ONCE."""
        frames = []
        for _ in range(FRAMES_AT_ONCE):
            try:
                frame, address = source.recvfrom(FRAME_BYTES)
            except BlockingIOError:
                break
            if address[2] != socket.PACKET_OUTGOING:  # not the frames that the kernel sends on this interface
                frames.append(frame)
        return frames

    def _send(self, target: socket.socket, frame: bytes) -> None:
        """Send a frame. It is lost if the buffer is full."""
        try:
            target.send(frame)
        except BlockingIOError:  # its buffer is full, as a router's may be
            self.counts.lost += 1

    def _open(self, name: str) -> socket.socket:
        """Open a socket for all frames of an interface."""
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
        end.bind((name, 0))
        end.setblocking(False)
        return end


def main(hold_ms: str, loss: str, seed: str, *pairs: str) -> None:
    """Copy frames between these interfaces until SIGTERM, then print the numbers of delayed and lost frames."""
    links = SlowLinks(int(hold_ms) / 1_000, float(loss), int(seed))
    for pair in pairs:
        links.add(*pair.split("="))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print("ready", flush=True)
    try:
        links.run()
    finally:
        print(json.dumps(asdict(links.counts)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
