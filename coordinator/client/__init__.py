"""The Python client."""

from coordinator.client.client import Client, open_client, run_client
from coordinator.client.connection import ConnectionLost
from coordinator.client.token_stream import Stream

__all__ = ["Client", "ConnectionLost", "Stream", "open_client", "run_client"]
