"""The node's host pool: its file, its size, and its registration with CUDA."""
