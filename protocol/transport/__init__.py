"""ZMQ under trio: the dealer socket and the CURVE keys. Nothing here knows what a message means."""
