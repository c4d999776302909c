"""The Python client."""

from coordinator.client.client import Client, ConnectionLost, open_client, run_client
from coordinator.client.token_stream import Stream

__all__ = ["Client", "ConnectionLost", "Stream", "open_client", "run_client"]
