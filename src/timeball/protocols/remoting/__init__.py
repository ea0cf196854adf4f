"""RocketMQ's remoting protocol: what 4.x and 5.x clients in Java, C++, Go and Node speak.

Receives: frames on a connection (codec/frame.py), each a command with a header in one of two serialisations.
Keeps: nothing yet: there is the codec, and no server.
Hands on: commands and column batches; answers in the serialisation of the request.
"""
