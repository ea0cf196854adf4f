"""Connections between nodes: ordered in each direction, delayed, cut, replaced, blocked one way."""

from __future__ import annotations

from collections import deque
from random import Random

from timeball.cluster.protocol.messages import Message

Pair = tuple[str, str]  # who opened the connection, and to whom


class Connection:
    """One connection. None in a direction is its end."""

    def __init__(self) -> None:
        self.out: deque[Message | None] = deque()  # from who opened it
        self.back: deque[Message | None] = deque()
        self.has_ended = False


class Wire:
    """All connections. `blocked` holds directions in which nothing arrives now."""

    def __init__(self) -> None:
        self.connections: dict[Pair, Connection] = {}
        self.blocked: set[Pair] = set()

    def open(self, node: str, to: str) -> bool:
        """Open a connection, unless it is there or a handshake cannot pass."""
        if (node, to) in self.connections or (node, to) in self.blocked or (to, node) in self.blocked:
            return False
        self.connections[node, to] = Connection()
        return True

    def send(self, node: str, to: str, message: Message, *, is_answer: bool) -> None:
        """Send on the connection that `node` has opened, or answer on the one that `to` has."""
        connection = self.connections.get((to, node) if is_answer else (node, to))
        if connection is not None and not connection.has_ended:
            (connection.back if is_answer else connection.out).append(message)

    def end(self, pair: Pair, random: Random, *, dead: str = "") -> None:
        """End a connection: each living side gets some of the messages in transit, and then the end."""
        connection = self.connections[pair]
        for queue, reader in ((connection.out, pair[1]), (connection.back, pair[0])):
            if not connection.has_ended:
                for _ in range(random.randint(0, len(queue))):
                    queue.pop()
                queue.append(None)
            if reader == dead:
                queue.clear()
        connection.has_ended = True

    def hang_up(self, node: str, random: Random) -> None:
        """End all connections that `node` has opened, with its notice."""
        for pair in [pair for pair in self.connections if pair[0] == node]:
            self.end(pair, random)
            self.connections[pair].back.clear()
            self._forget(pair)

    def die(self, node: str, random: Random) -> None:
        """End all connections of a process that has ended."""
        for pair in [pair for pair in self.connections if node in pair]:
            self.end(pair, random, dead=node)
            self._forget(pair)

    def waiting(self) -> list[tuple[Pair, bool]]:
        """List the directions in which a message can arrive: the connection, and True for its answers."""
        directions = []
        for pair, connection in self.connections.items():
            if connection.out and pair not in self.blocked:
                directions.append((pair, False))
            if connection.back and pair[::-1] not in self.blocked:
                directions.append((pair, True))
        return directions

    def take(self, pair: Pair, *, back: bool) -> Message | None:
        """Take the next message of a direction. None is the end of the connection."""
        connection = self.connections[pair]
        message = (connection.back if back else connection.out).popleft()
        if message is None:
            self._forget(pair)
        return message

    def _forget(self, pair: Pair) -> None:
        connection = self.connections[pair]
        if not connection.out and not connection.back:
            del self.connections[pair]
