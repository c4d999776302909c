"""The version of this hisparse."""

from __future__ import annotations


def our_version() -> str:
    """Version of the installed distribution; "source" in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that most imports of this module do not need

    try:
        return version("hisparse")
    except PackageNotFoundError:
        return "source"
