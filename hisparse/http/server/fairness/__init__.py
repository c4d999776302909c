"""Fairness among clients of the front: whose turn it is, what each may hold at once, and who is slowed down."""
