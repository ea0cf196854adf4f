"""The edge for RocketMQ's remoting protocol, which the 4.x and 5.x clients in Java, C++, Go and Node use.

Input: frames on a connection (codec/frame.py). Each contains a command with a header in one of two serialisations.
State: connected clients, their subscriptions and the locks of queues. It is lost when the process ends.
Output: commands and column batches for the broker. Answers have the serialisation of the request.
"""
