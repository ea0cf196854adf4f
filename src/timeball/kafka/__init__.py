"""Kafka in and out: records that say when are kept by Timeball, and are in Kafka again at their instant, exactly once.

    Receives: records of one Kafka topic, whose headers say when
    Keeps: nothing. How far Kafka's records were taken stands in Timeball's log, in the frame of their messages; how far
      Timeball's messages were delivered stands in Kafka, in the transaction of their records
    Hands on: the same records to other topics of Kafka; what cannot be taken, to a dead letter topic with the reason

A process of its own beside the broker (`timeball kafka`), which it reaches as a client. `records` is bytes only;
`intake` goes from Kafka to Timeball, `delivery` back, and `bridge` runs both. Only this room knows Kafka's client.
"""
