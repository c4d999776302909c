"""Chat templates of tiny checkpoints, by family: those of which calls are read."""

from __future__ import annotations

from typing import Final

from hisparse.http.models.formats.known import FORMATS
from worker.families.table import FAMILIES

TEMPLATES: Final = {it.name: it.template for it in FAMILIES.values() if FORMATS[it.chat].syntax is not None}
