"""The same work on Apache RocketMQ 5.5.0 and on Timeball, side by side in one run, and deliveries to a consumer beside
Redis, NATS and beanstalkd: `make versus`.

    machine.py     the machine, as the page names it
    page_cache.py  memory that is in use, as on a machine that has served for a while
    load.c         the load generator, with ring.h; load.py compiles and runs it
    peers.py       a broker that is measured: start, stop, kill, addresses, CPU, memory, disk; Timeball
    rocketmq.py    RocketMQ: name server and broker, or the proxy in local mode
    other_peers.py, delayed_queues.py     Redis, NATS and beanstalkd, and a client of each
    wire.py        one remoting connection: topics, offsets, stored messages
    work.py        a piece of work, the rows it fills, what one measurement says
    sending.py, pulling.py, delays.py, calls.py, stock.py, delivery.py, groups.py     the work
    table.py       medians, ratios, the page docs/versus.md
    __main__.py    options and rounds

Each round runs a piece of work on one broker, then on the other, and the next round in the other order. Both are up and
warm: RocketMQ is loaded until its rate grows by less than 3 % in 10 s. They share the machine with the load generator.
A broker that is added later is one more class beside RocketMQ and one more column: work asks a peer which wires it
speaks, and leaves its cells empty where it speaks none of them.

Not measured: the network (loopback), other disks, TLS, several brokers, replication, producers beside consumers (except
in the second table), cold reads (messages are pulled soon after they were written, and are in memory).
"""
