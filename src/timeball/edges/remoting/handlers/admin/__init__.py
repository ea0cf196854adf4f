"""Administration: the requests of RocketMQ's tools and consoles, in modules by subject.

    topics               create, change, list, delete; the name server's table of ordered topics
    groups               consumer groups: configure, list, delete; their members, and connected clients
    progress             the progress of queues and groups; resets of offsets
    client_forwarding    requests that a tool sends to a consumer
    runtime              metrics and settings

Producers and ordinary consumers do not use these requests.
"""
