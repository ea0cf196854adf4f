"""What a broker says of itself to a machine that watches it: metrics, and how quickly its event loop turns."""
