"""Weights from a published repository to the device: layout, quantization, shards, loading."""
