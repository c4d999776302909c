"""`python -m kernels.cuda.header`: writes src/layout.cuh, the device's form of structures.py.

The file is checked in, for readers and for compilers that know nothing of Python; a test holds it to what this writes.
Rejected: headers made when a kernel is compiled (a reader of the sources would not find the structures).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

from kernels.cuda.jit import SOURCE_DIR
from kernels.cuda.structures import CONSTANTS, ENUMERATIONS, STRUCTURES, UNSIGNED, Structure

HEADER: Final = SOURCE_DIR / "layout.cuh"
COMMAND: Final = "python -m kernels.cuda.header"
BEGIN: Final = f"""\
// Generated from kernels/cuda/structures.py by `{COMMAND}`: change it there.
//
// What host and device share: constants, enumerations, tables and kernel parameters.
#pragma once

namespace hisparse {{

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
"""


def render() -> str:
    """The header's text."""
    parts = [BEGIN, *map(_constant, CONSTANTS), "", *map(_enumeration, ENUMERATIONS), ""]
    for structure in STRUCTURES:
        parts += [*_structure(structure), ""]
    return "\n".join([*parts, "}  // namespace hisparse"]) + "\n"


def _constant(name: str) -> str:
    value, comment = CONSTANTS[name]
    line = f"constexpr {'u32' if name in UNSIGNED else 'int'} {name} = {value};"
    return f"{line}  // {comment}" if comment else line


def _enumeration(of: type[IntEnum]) -> str:
    return f"enum {of.__name__} {{ {', '.join(f'{member.name} = {member.value}' for member in of)} }};"


def _structure(of: type[Structure]) -> Iterator[str]:
    if of.__doc__:
        yield from (f"// {line.strip()}" for line in of.__doc__.splitlines())
    yield f"struct {f'alignas({of.align}) ' if of.align else ''}{of.__name__} {{"
    members = [(f"{kind} {names};", *comment) for kind, names, *comment in of.members]
    width = max((len(member) for member, *comment in members if comment), default=0)
    for member, *comment in members:
        yield f"    {member:<{width}}  // {comment[0]}" if comment else f"    {member}"
    yield "};"
    yield f'static_assert(sizeof({of.__name__}) == {ctypes.sizeof(of)}, "as ctypes lays it out");'


if __name__ == "__main__":
    HEADER.write_text(render())
