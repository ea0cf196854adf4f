"""Administration: the requests of RocketMQ's tools and consoles, in modules by subject.

    topics      create, change, list, delete; the name server's table of ordered topics; the broker's metrics and
                settings
    groups      consumer groups: configure, list, delete; their members, and connected clients; requests that a tool
                sends to a consumer
    progress    the progress of queues and groups; resets of offsets

Producers and ordinary consumers do not use these requests.
"""
