"""Administration: what RocketMQ's tools and consoles ask a broker, in rooms by what they ask about.

    topics               create, change, list, delete; the name server's table of ordered topics
    groups               consumer groups: configure, list, delete; their members, and who is connected
    progress             how far queues and groups have come; offsets set back to an instant
    client_forwarding    questions that a consumer answers
    runtime              figures and settings

Nothing of it is on the way of a message.
"""
