"""The stock C++ client, as in PyPI's `rocketmq`, driven by JSON lines: requests on stdin, answers and events on
stdout. Runs in a separate environment without Timeball: `cpp_client.py NAME_SERVER`.

It decides nothing: the tests decide the messages, the failures and the expected results.
"""

import collections
import json
import os
import sys
import threading

import rocketmq.client as stock

NAME_SERVER = sys.argv[1]
CONSUMED, LATER = stock._CConsumeStatus.CONSUME_SUCCESS, stock._CConsumeStatus.RECONSUME_LATER
_out = threading.Lock()


def emit(line):
    """Write a line in one piece, from any thread."""
    with _out:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def text(value):
    """Return bytes as text, and None unchanged."""
    return value.decode() if isinstance(value, bytes) else value


def sign(client):
    """Let the client sign its requests, if it has an account."""
    key, secret = (os.environ.get(name) for name in ("STOCK_ACCESS_KEY", "STOCK_SECRET_KEY"))
    if key:
        client.set_session_credentials(key, secret, "")


PROPERTIES = [  # the properties that tests check
    "UNIQ_KEY",
    "DELAY",
    "REAL_TOPIC",
    "REAL_QID",
    "TIMER_DEQUEUE_MS",
    "TIMER_ENQUEUE_MS",
    "TIMER_OUT_MS",
    "RETRY_TOPIC",
    "ORIGIN_MESSAGE_ID",
    "CLUSTER",
    "colour",
]


def describe(message):
    """Return the fields of a received message that tests check."""
    properties = {name: text(message.get_property(name)) for name in PROPERTIES}
    return {
        "topic": message.topic,
        "body": text(message.body),
        "tag": text(message.tags) or None,
        "keys": text(message.keys) or None,
        "message_id": message.id,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "born_ms": message.born_timestamp,
        "store_ms": message.store_timestamp,
        "reconsume_times": message.reconsume_times,
        "properties": {name: value for name, value in properties.items() if value},
    }


class Client:
    """The requests, one method for each `op` (drivers.py describes them). `running` has the stock clients by name."""

    def __init__(self):
        self.running = {}
        self.failures = collections.Counter()

    # ---- producing

    def producer(self, request):
        """Start a producer."""
        producer = stock.Producer(request["group"], timeout=20_000)
        producer.set_namesrv_addr(NAME_SERVER)
        sign(producer)
        producer.start()
        self.running[request["name"]] = producer

    def message(self, request):
        """Return the stock message for a request."""
        message = stock.Message(request["topic"])
        message.set_body(request["body"])
        if "tag" in request:
            message.set_tags(request["tag"])
        if "keys" in request:
            message.set_keys(request["keys"])
        if "level" in request:
            message.set_delay_time_level(request["level"])
        for name, value in request.get("properties", {}).items():
            message.set_property(name, str(value))
        if "timer" in request:
            message.set_property(request["timer"], str(request["timer_value"]))
        return message

    def send(self, request):
        """Send a message, and return the result."""
        producer, message = self.running[request["producer"]], self.message(request)
        if "queue_id" in request:
            return self.describe_result(producer.send_orderly(message, request["queue_id"]))
        return self.describe_result(producer.send_sync(message))

    def send_batch(self, request):
        """Send a batch, and return the result."""
        messages = [self.message(fields) for fields in request["messages"]]
        return self.describe_result(self.running[request["producer"]].send_batch(messages))

    def describe_result(self, result):
        """Return the result of a send for the tests."""
        return {
            "status": "SEND_" + result.status.name,
            "message_id": result.msg_id,
            "queue_offset": result.offset,
        }

    # ---- consuming

    def consumer(self, request):
        """Start a push consumer, which reports each delivery. The first `fail` deliveries of a body fail."""
        name, fail = request["name"], request.get("fail", 0)
        model = stock.MessageModel.BROADCASTING if request.get("broadcast") else stock.MessageModel.CLUSTERING
        consumer = stock.PushConsumer(
            request["group"], orderly=request.get("orderly", False), message_model=model
        )
        consumer.set_namesrv_addr(NAME_SERVER)
        sign(consumer)
        consumer.set_instance_name(name)

        def take_delivery(_, handle):
            """Report a delivery, and return whether it has succeeded."""
            fields = describe(stock.RecvMessage(handle))
            self.failures[name, fields["body"]] += 1
            done = self.failures[name, fields["body"]] > fail
            emit({"event": "message", "consumer": name, "done": done, "message": fields})
            return (CONSUMED if done else LATER).value

        # Not `subscribe`: it raises a listener's error into the C++ client, where it may count as success.
        topic, expression = request["topic"].encode(), request["expression"].encode()
        stock.ffi_check(stock.dll.Subscribe(consumer._handle, topic, expression))
        consumer._register_callback(take_delivery)
        consumer.start()
        self.running[name] = consumer

    def pull(self, request):
        """Read all messages of a topic. This client has no pull of one queue from one offset."""
        consumer = stock.PullConsumer(request["group"])
        consumer.set_namesrv_addr(NAME_SERVER)
        sign(consumer)
        consumer.start()
        try:
            return {
                "messages": [
                    describe(message) for message in consumer.pull(request["topic"], request["expression"])
                ]
            }
        finally:
            consumer.shutdown()

    def stop(self, request):
        """Stop a producer or a consumer."""
        self.running.pop(request["name"]).shutdown()


def answer(client, request):
    """Perform a request, and write its result or its error."""
    line = {"id": request["id"]}
    try:
        line["result"] = getattr(client, request["op"])(request)
    except Exception as error:  # any error of the client is for the test to judge
        line["error"] = {"type": type(error).__name__, "text": str(error)}
    emit(line)


def main():
    """Perform each request on stdin in a thread of its own."""
    client = Client()
    emit({"event": "ready"})
    for line in sys.stdin:
        threading.Thread(target=answer, args=(client, json.loads(line)), daemon=True).start()


if __name__ == "__main__":
    main()
