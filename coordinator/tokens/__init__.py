"""The token log: the generated tokens of all requests, in arrays."""
