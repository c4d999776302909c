"""Placement of requests: the Scheduler and its Requests, and the pure parts that decide for them."""
