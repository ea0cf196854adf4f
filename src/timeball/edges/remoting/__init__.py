"""RocketMQ's remoting protocol, the protocol of the 4.x and 5.x clients in Java, C++, Go and Node.

Receives: frames on a connection (codec/frame.py). Each is a command with a header in one of two serialisations.
Keeps: connected clients, their subscriptions and the locks of queues. None of that outlives the process.
Hands on: commands and column batches. Answers use the serialisation of the request.
"""
