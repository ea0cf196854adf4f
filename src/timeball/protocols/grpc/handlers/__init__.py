"""What each call of a RocketMQ 5 client means: fields in, the broker's verb, a response out."""
