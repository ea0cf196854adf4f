"""What each request of a RocketMQ client means: fields in, the broker's verb, an answer out."""
