"""RocketMQ's own Python client, `pip install rocketmq-python-client`, over gRPC: send with a delay, recall, receive.

Needs a broker on this machine: `timeball serve`.
"""

import time

from rocketmq import ClientConfiguration, Credentials, FilterExpression, Message, Producer, SimpleConsumer

broker = ClientConfiguration("127.0.0.1:8081", Credentials())
producer = Producer(broker, ["orders"])
producer.startup()
consumer = SimpleConsumer(broker, "billing", {"orders": FilterExpression("*")})
consumer.startup()


def send(text: str, after_s: int):
    message = Message()
    message.topic, message.body = "orders", text.encode()
    message.delivery_timestamp = int(time.time()) + after_s  # this client counts in whole seconds
    return producer.send(message)


send("close order 17 if unpaid", after_s=3)
reminder = send("ask how it was", after_s=365 * 86_400)
print(producer.recall_message("orders", reminder.recall_handle) == reminder.message_id)  # True

for message in consumer.receive(16, 30):  # waits for the first; what is not acknowledged in 30 s comes again
    print(message.body.decode(), message.delivery_attempt)  # close order 17 if unpaid 1
    consumer.ack(message)

consumer.shutdown()
producer.shutdown()
