"""The stock Python client for gRPC, PyPI's `rocketmq-python-client`, driven by JSON lines: requests on stdin, answers
and events on stdout. Runs in a separate environment without Timeball: `grpc_client.py ENDPOINT`.

It decides nothing: the tests decide the messages, the failures and the expected results.
"""

import asyncio
import collections
import itertools
import json
import sys
import threading
import time

import rocketmq as stock
from rocketmq.grpc_protocol import FilterType

ENDPOINT = sys.argv[1]
REQUEST_S = 10
RESOLUTIONS = {
    "COMMIT": stock.TransactionResolution.COMMIT,
    "ROLLBACK": stock.TransactionResolution.ROLLBACK,
    "UNKNOWN": stock.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED,
}
# If the broker answers the query for a route before the client has registered its callback, the client opens its
# Telemetry stream in the calling thread. grpc then needs an event loop in that thread, and only the main
# thread has one by default. In any other thread the stream never runs.
LOOP = asyncio.new_event_loop()
_out = threading.Lock()


def emit(line):
    """Write a line in one piece, from any thread."""
    with _out:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def describe(message):
    """Return the fields of a received message that tests check."""
    return {
        "topic": message.topic,
        "body": message.body.decode(),
        "tag": message.tag,
        "keys": sorted(message.keys),
        "message_id": message.message_id,
        "born_ms": message.born_timestamp,
        "due_ms": message.delivery_timestamp or None,
        "message_group": message.message_group,
        "attempt": message.delivery_attempt,
        "corrupted": message.corrupted,
        "properties": dict(message.properties),
    }


def configuration(request):
    """Return the stock configuration with the request's account and endpoint."""
    keys = stock.Credentials(request.get("access_key", ""), request.get("secret_key", ""))
    return stock.ClientConfiguration(request.get("endpoint", ENDPOINT), keys, request_timeout=REQUEST_S)


def subscription(request):
    """Return the filter of a request by topic."""
    if "sql" in request:
        return {request["topic"]: stock.FilterExpression(request["sql"], FilterType.SQL)}
    return {request["topic"]: stock.FilterExpression(request.get("expression", "*"))}


class Checker(stock.TransactionChecker):
    def check(self, message):
        """Report a check, and answer with the property `check` of the half message."""
        emit({"event": "check", "message": describe(message)})
        return RESOLUTIONS[message.properties["check"]]


class Listener(stock.MessageListener):
    """Reports each message, and the end of `work_ms`. The first `fail` deliveries fail. With `hold`, it never ends."""

    def __init__(self, name, fail, hold, work_ms):
        self.name, self.fail, self.hold, self.work_ms = name, fail, hold, work_ms
        self.failures = collections.Counter()
        self.lock = threading.Lock()

    def consume(self, message):
        """Report a delivery, and return whether it has succeeded."""
        fields = describe(message)
        with self.lock:
            self.failures[fields["body"]] += 1
            done = self.failures[fields["body"]] > self.fail
        emit({"event": "message", "consumer": self.name, "done": done, "message": fields})
        if self.hold:
            threading.Event().wait()
        if self.work_ms:
            time.sleep(self.work_ms / 1000)
            emit({"event": "end", "consumer": self.name, "body": fields["body"]})
        return stock.ConsumeResult.SUCCESS if done else stock.ConsumeResult.FAILURE


class Client:
    """The requests, one method for each `op` (drivers.py describes them). `running` has the stock clients by name."""

    def __init__(self):
        self.running = {}
        self.received = {}
        self.numbers = itertools.count(1)

    # ---- producing

    def producer(self, request):
        """Start a producer."""
        checker = Checker() if request.get("transactions") else None
        self.start(
            request,
            stock.Producer(
                configuration(request),
                [request["topic"]] if "topic" in request else None,
                checker=checker,
                tls_enable=request.get("tls", False),
            ),
        )

    def start(self, request, client):
        """Start a stock client, and keep it by the request's name."""
        client.startup()
        self.running[request["name"]] = client

    def message(self, request):
        """Return the stock message for a request."""
        message = stock.Message()
        message.topic = request["topic"]
        message.body = request["body"].encode()
        if "tag" in request:
            message.tag = request["tag"]
        if "keys" in request:
            message.keys = request["keys"]
        if "message_group" in request:
            message.message_group = request["message_group"]
        for name, value in request.get("properties", {}).items():
            message.add_property(name, str(value))
        if "due_ms" in request:  # this client only has whole seconds
            assert request["due_ms"] % 1000 == 0
            message.delivery_timestamp = request["due_ms"] // 1000
        return message

    def send(self, request):
        """Send a message, and return the result."""
        return self.describe_result(self.running[request["producer"]].send(self.message(request)))

    def send_transaction(self, request):
        """Send a half message, and commit it, roll it back or leave it open."""
        producer = self.running[request["producer"]]
        transaction = producer.begin_transaction()
        sent = self.describe_result(producer.send(self.message(request), transaction))
        if request["local"] == "COMMIT":
            transaction.commit()
        elif request["local"] == "ROLLBACK":
            transaction.rollback()
        return sent

    def describe_result(self, receipt):
        """Return the result of a send for the tests."""
        return {
            "message_id": receipt.message_id,
            "transaction_id": receipt.transaction_id,
            "queue_offset": receipt.offset,
            "recall_handle": receipt.recall_handle,
        }

    def recall(self, request):
        """Recall a message, and return its id."""
        return self.running[request["producer"]].recall_message(request["topic"], request["handle"])

    # ---- consuming

    def simple(self, request):
        """Start a simple consumer."""
        self.start(
            request,
            stock.SimpleConsumer(
                configuration(request),
                request["group"],
                subscription(request),
                await_duration=request["wait_s"],
                tls_enable=request.get("tls", False),
            ),
        )

    def receive(self, request):
        """Receive messages. Return each with a number for its acknowledgement and for changes of its invisible time."""
        consumer = self.running[request["consumer"]]
        messages = []
        for message in consumer.receive(request["count"], request["invisible_s"]):
            number = next(self.numbers)
            self.received[number] = message
            messages.append(
                {**describe(message), "number": number, "received_ms": time.time_ns() // 1_000_000}
            )
        return messages

    def ack(self, request):
        """Acknowledge a received message by its number."""
        self.running[request["consumer"]].ack(self.received[request["number"]])

    def change(self, request):
        """Change the invisible time of a received message by its number."""
        message = self.received[request["number"]]
        self.running[request["consumer"]].change_invisible_duration(message, request["invisible_s"])

    def push(self, request):
        """Start a push consumer with a Listener."""
        options = request.get("fail", 0), request.get("hold", False), request.get("work_ms", 0)
        listener = Listener(request["name"], *options)
        self.start(
            request,
            stock.PushConsumer(
                configuration(request),
                request["group"],
                listener,
                subscription(request),
                tls_enable=request.get("tls", False),
            ),
        )

    def stop(self, request):
        """Stop a producer or a consumer."""
        self.running.pop(request["name"]).shutdown()


def answer(client, request):
    """Perform a request, and write its result or its error."""
    asyncio.set_event_loop(LOOP)  # see LOOP
    line = {"id": request["id"]}
    try:
        line["result"] = getattr(client, request["op"])(request)
    except Exception as error:  # any error of the client is for the test to judge
        code = getattr(error, "code", None)
        line["error"] = {
            "type": type(error).__name__,
            "text": str(error),
            "code": code if isinstance(code, int) else None,
        }
    emit(line)


def main():
    """Perform each request on stdin in a thread of its own."""
    client = Client()
    emit({"event": "ready"})
    for line in sys.stdin:
        threading.Thread(target=answer, args=(client, json.loads(line)), daemon=True).start()


if __name__ == "__main__":
    main()
