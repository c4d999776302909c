"""Which hisparse this is."""

from __future__ import annotations


def our_version() -> str:
    """Of the installed distribution; "source" when running from a checkout that was not installed."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms that most imports of this module do not need

    try:
        return version("hisparse")
    except PackageNotFoundError:
        return "source"
