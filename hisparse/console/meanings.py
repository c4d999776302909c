"""The meaning of each setting: the comment of its declaration in protocol/settings.py, which help and docs show."""

from __future__ import annotations

import ast
import io
import pkgutil
import tokenize
from functools import cache


@cache
def meanings() -> dict[str, str]:
    """Sentences by "section.field". Reads the source: its import would take longer than the help of a command may."""
    source = pkgutil.get_data("protocol", "settings.py") or b""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.tokenize(io.BytesIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for section in ast.parse(source).body:
        if isinstance(section, ast.ClassDef) and section.name.endswith("Settings"):
            for field in section.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
                    text = " ".join(comments[line] for line in lines if line in comments)
                    found[f"{section.name.removesuffix('Settings').lower()}.{field.target.id}"] = _sentence(text)
    return found


def _sentence(text: str) -> str:
    """With a capital, unless the first word is a value."""
    return f"{text[:1].upper()}{text[1:]}." if text.partition(" ")[0].rstrip(":").isalpha() else f"{text}."
