"""Hostile peers before real processes, and what they cost a client that is none of them."""
