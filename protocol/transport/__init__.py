"""ZMQ under trio: the dealer socket, the CURVE keys and the frames. Nothing here knows what a message means."""
