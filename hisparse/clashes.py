"""Whether the top-level packages that Python would import are those of this distribution.

Other distributions own the names `kernels` and `protocol`, too, and so may a directory beside a user's program. Python
imports the first one on sys.path: ours beside hisparse, or another one, whose missing modules would then be reported
far from the cause. What an import would find is looked up here before any is made; that takes a fraction of a
millisecond.

    another directory     a package, a module or a namespace package that comes first, or is imported already
    the same directory    a distribution installed over ours: its `__init__.py` has not our MARK
    none                  an incomplete installation

Rejected: metadata of installed distributions (50 ms, and it says nothing of the working directory).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Final

#: Top-level packages of this distribution beside `hisparse`.
PACKAGES: Final = ("basics", "coordinator", "kernels", "metrics", "protocol", "worker")
#: Stands in the docstring of each of their `__init__.py`, within HEAD_BYTES.
MARK: Final = b"Internal to hisparse"
HEAD_BYTES: Final = 4_096
ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REMEDY: Final = (
    "take it off the path (working directory, PYTHONPATH), or install hisparse alone in a virtual environment"
)


class NameClash(ImportError):
    """Another package stands where one of this distribution should. Says names, paths and remedy in one line."""


def check_packages() -> None:
    """Raises NameClash naming every package that an import would not take from beside hisparse. Imports nothing."""
    clashes = [f"{name}={found}: {problem}" for name in PACKAGES for found, problem in _problems(name)]
    if clashes:
        raise NameClash(f"{'; '.join(clashes)} ({REMEDY})", name=clashes[0].partition("=")[0])


def is_command() -> bool:
    """Whether this process was started as `hisparse` or `python -m hisparse.cli`, which reports a clash by itself."""
    return os.path.basename(next(iter(sys.argv), "")) == "hisparse" or "hisparse.cli" in sys.orig_argv


def _problems(name: str) -> list[tuple[str, str]]:
    """What is found for `name`, and what is wrong with it; empty when nothing is."""
    own = os.path.join(ROOT, name)
    found = _find(name)
    if not found:
        return [("none", f"hisparse's own is missing at {own}")]
    if found != own and os.path.realpath(found) != os.path.realpath(own):
        return [(found, f"it hides hisparse's own at {own}")]
    if not _is_marked(found):
        return [(found, f"another distribution has written over hisparse's own at {own}")]
    return []


def _find(name: str) -> str:
    """The directory of the package that `import name` gives, or the file of a module; empty: none."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # imported already, and made by hand: it has no spec
        return getattr(sys.modules[name], "__file__", None) or repr(sys.modules[name])
    if spec is None:
        return ""
    places = list(spec.submodule_search_locations or ())
    return places[0] if places else spec.origin or repr(spec)


def _is_marked(package: str) -> bool:
    try:
        with open(os.path.join(package, "__init__.py"), "rb") as file:
            return MARK in file.read(HEAD_BYTES)
    except OSError:
        return True  # in an archive, or compiled alone: it lies beside hisparse
