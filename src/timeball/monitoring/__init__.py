"""What a broker says of itself to what watches it: metrics, how quickly its event loop turns, and systemd's states."""
