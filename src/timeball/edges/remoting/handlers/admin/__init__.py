"""Administration: the requests of RocketMQ's tools and consoles, in modules by subject.

    topics               create, change, list, delete; the name server's table of ordered topics
    groups               consumer groups: configure, list, delete; their members, and connected clients
    progress             the progress of queues and groups; offsets reset to a time
    client_forwarding    questions that a consumer answers
    runtime              figures and settings

No message passes through these modules.
"""
