"""A process that keeps a worker's weights, so that the next worker maps them instead of loading them."""
