"""The Python client."""

from coordinator.client.client import Client

__all__ = ["Client"]
