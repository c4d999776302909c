"""trio and ZMQ, and nothing that knows what a message means."""
