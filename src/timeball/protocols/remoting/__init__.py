"""RocketMQ's remoting protocol: what 4.x and 5.x clients in Java, C++, Go and Node speak.

Receives: frames on a connection (codec/frame.py), each a command with a header in one of two serialisations.
Keeps: who is connected, what they subscribe to, and queues' locks; nothing that outlives the process.
Hands on: commands and column batches; answers in the serialisation of the request.
"""
