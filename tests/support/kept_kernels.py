"""Compiled kernels that outlive a run of the suite, by content, in the user's cache folder.

They are there, not in the clone, because a key covers all that the result depends on, and no comment: clones and
worktrees of a user share them, and a fresh clone begins with them. `make clean` removes them; files that are old or too
many are removed by the next run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Final

from kernels.cuda import jit
from kernels.cuda.jit import Defines

#: Bounds: days since a file was made, and bytes of all files. A run of the suite makes some 90 MB.
KEPT_DAYS: Final = 14
KEPT_BYTES: Final = 256 << 20
#: Locks: kernels under different ones are compiled at the same time.
LOCKS: Final = 64
#: A comment of C++, or a string, in which none begins.
COMMENT: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@cache
def folder() -> Path:
    """Return their directory, made when missing; within its bounds when a process asks first."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hisparse-tests"
    place.mkdir(parents=True, exist_ok=True)
    prune(place, time.time())
    return place


def kept(name: str, key: str, compile_it: Callable[[], jit.Compiled]) -> jit.Compiled:
    """Return what `compile_it` gave under `key`, in any run. Of processes that ask at once one compiles."""
    number = zlib.crc32(key.encode()) % LOCKS
    with (folder() / f"{number}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return jit.cached(folder() / f"{name}-{key}", compile_it)


def kept_unit(unit: str, defines: Defines, arch: str) -> jit.Compiled:
    """Compile as jit.compile_unit does."""
    return kept(f"{unit}-{arch}", unit_key(unit, defines, arch), partial(jit.compile_unit, unit, defines, arch))


def unit_key(unit: str, defines: Defines, arch: str) -> str:
    """Changes with what the compiled unit depends on, and with the module that compiles."""
    headers = jit.included(jit._source_of(unit), jit.headers_of_kernels())
    about = (unit, arch, str(jit.OPTIONS), str(jit._nvrtc_version()), Path(jit.__file__).read_text())
    return digest(*about, *sources_key(headers, defines))


def sources_key(sources: Mapping[str, str], defines: Defines) -> list[str]:
    """Return the parts of `sources`, by their names, and of `defines` that a compiler heeds: code, and names in it.

    No line numbers are compiled in.
    """
    code = {name: _code(text) for name, text in sources.items()}
    named = {word for text in code.values() for word in re.findall(r"\w+", text)}
    return [*(str(it) for it in defines if it[0] in named), *code, *code.values()]


@cache
def _code(text: str) -> str:
    """Take comments and empty lines out of C++."""
    without = COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)
    return "\n".join(filter(None, (line.rstrip() for line in without.splitlines())))


def digest(*parts: str) -> str:
    """A key over `parts`."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def prune(place: Path, now: float) -> None:
    """Remove files of more than KEPT_DAYS, and the oldest ones beyond KEPT_BYTES. Other processes may do so, too."""
    left = KEPT_BYTES
    files = [path for path in place.iterdir() if not path.is_dir()]  # mypy has a folder there
    for made, size, path in sorted(((*_made_and_size(path), path) for path in files), reverse=True):
        left -= size
        if left < 0 or now - made > KEPT_DAYS * 86_400:
            path.unlink(missing_ok=True)


def _made_and_size(path: Path) -> tuple[float, int]:
    try:
        about = path.stat()
    except FileNotFoundError:
        return 0.0, 0
    return about.st_mtime, about.st_size
