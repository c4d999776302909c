"""Clients and admins: who is connected, what they asked for, and the tokens they are owed."""
