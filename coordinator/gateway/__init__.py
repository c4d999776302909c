"""Clients and admins: their connections, their commands, and the delivery of tokens."""
