"""Kafka itself, one node in KRaft mode on loopback, started, killed and restarted on its ports and its folder."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic
from tests.bounds import BOUND_S
from tests.ports import free_ports

HEAP = ["-Xms192m", "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qg"
MESSAGE_BYTES_MAX = 8 * 1024 * 1024  # more than a message of Timeball's may have
TRIES = 3
SETTINGS: dict[str, str | int] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    # A resource without rules is open to all, as before the first test that makes rules.
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
    "message.max.bytes": MESSAGE_BYTES_MAX,
    "replica.fetch.max.bytes": MESSAGE_BYTES_MAX,
    "offsets.topic.num.partitions": 1,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "group.initial.rebalance.delay.ms": 0,
    "log.cleaner.dedupe.buffer.size": 4 * 1024 * 1024,
    "num.network.threads": 2,
    "num.io.threads": 2,
    "background.threads": 2,
}


class KafkaServer:
    """One Kafka, which runs from `start` to `kill` (SIGKILL). The next `start` continues with the same data and ports.

    `command` is the prefix of commands that run a class of Kafka, and `heap` has the options of Java for the server.
    """

    def __init__(self, folder: Path, command: list[str], heap: Sequence[str] = HEAP) -> None:
        self._folder, self._command, self._heap = folder, command, heap
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir()
        self._choose_ports()
        self._run("kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", "server.properties")

    def _choose_ports(self) -> None:
        """Choose free ports, and write the configuration with them."""
        port, controller = free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        settings = {
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "log.dirs": self._folder / "log",
            **SETTINGS,
        }
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self._folder / "server.properties").write_text(text)

    def start(self) -> None:
        """Start the server, and wait until it answers.

        If it ends at its first start, try again with other ports, because another process may have taken one of them.
        Its output does not tell the reason, because its log is not configured.
        """
        tries_left = 1 if (self._folder / "out").exists() else TRIES
        while (output := self._try_to_start()) is not None:
            tries_left -= 1
            assert tries_left, f"Kafka has ended: {output[-2_000:]}"
            self._choose_ports()

    def _try_to_start(self) -> str | None:
        """Start the server. Return None when it answers, or its output if it has ended."""
        java, *options = self._command
        path = self._folder / "out"
        with path.open("ab") as out:
            process = self._process = subprocess.Popen(
                [java, *self._heap, *options, "kafka.Kafka", "server.properties"],
                cwd=self._folder, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        admin, deadline_s = self.admin(), time.monotonic() + BOUND_S
        while True:
            try:
                admin.list_topics(timeout=1)
                if process.poll() is None:
                    return None
            except KafkaException as error:
                assert time.monotonic() < deadline_s, f"no answer from Kafka: {error}"
            if process.poll() is not None:
                return path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Return the process id of the server, which must be running."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the server if it runs, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def admin(self) -> AdminClient:
        """Return a new client for administration."""
        return AdminClient({"bootstrap.servers": self.bootstrap, "reconnect.backoff.max.ms": 500})

    def make(self, *names: str, partitions: int = 1, **config: str) -> None:
        """Create topics. A keyword is the name of a configuration with underscores in place of dots."""
        topic_config = {name.replace("_", "."): value for name, value in config.items()}
        admin = self.admin()  # referenced until the futures are done: they fail without their client
        futures = admin.create_topics([NewTopic(name, partitions, 1, config=topic_config) for name in names])
        for future in futures.values():
            future.result(BOUND_S)

    def forbid(self, topic: str, operation: AclOperation) -> None:
        """Forbid clients one operation on a topic, and allow them the others that a bridge uses."""
        used = {AclOperation.WRITE, AclOperation.READ, AclOperation.DESCRIBE_CONFIGS}
        permissions = dict.fromkeys(used, AclPermissionType.ALLOW) | {operation: AclPermissionType.DENY}
        rules = [
            AclBinding(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*", each, permission)
            for each, permission in permissions.items()
        ]  # fmt: skip
        admin = self.admin()  # referenced until the futures are done: they fail without their client
        for future in admin.create_acls(rules).values():
            future.result(BOUND_S)

    def _run(self, *arguments: str) -> None:
        """Run another class of Kafka in the server's folder. Raise AssertionError with its output if it fails."""
        java, *options = self._command
        command = [java, "-Xmx128m", "-XX:TieredStopAtLevel=1", *options, *arguments]
        done = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, timeout=BOUND_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
