"""Kafka in and out: Timeball keeps records with a due time, and writes them back to Kafka at that time, exactly once.

    Receives: records of one Kafka topic, whose headers state their due time
    Keeps: nothing. The position in Kafka's topic is stored in Timeball's log, in the frame of the messages. The
      position in Timeball's queue is stored in Kafka, in the transaction of the records
    Hands on: the same records to other topics of Kafka. A record that cannot be accepted goes to a dead letter topic,
      with the reason

The bridge is a separate process beside the broker (`timeball kafka`), and a client of it. `options` has the settings
and the topics. `records` converts between records and messages, and writes the local file. `intake` goes from Kafka to
Timeball, `delivery` goes back, and `bridge` runs both. Only this package uses Kafka's client.
"""
