"""The Python client. Programs import it from `hisparse`."""
