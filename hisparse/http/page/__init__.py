"""The page for people: GET / and its two files. No build step, no asset of another origin.

What models write goes into text nodes alone. The policy of its headers lets it load and ask nothing but this server.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Final

_TYPES: Final = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}

#: By path: the type, and the content.
FILES: Final[Mapping[str, tuple[str, bytes]]] = {
    path: (f"{kind}; charset=utf-8", (files(__name__) / name).read_bytes()) for path, (name, kind) in _TYPES.items()
}
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
