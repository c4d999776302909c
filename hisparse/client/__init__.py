"""The Python client."""

from hisparse.client.client import Client, open_client, run_client
from hisparse.client.connection import ConnectionLost
from hisparse.client.token_stream import TokenStream

__all__ = ["Client", "ConnectionLost", "TokenStream", "open_client", "run_client"]
