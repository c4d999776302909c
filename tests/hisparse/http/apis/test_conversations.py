"""Drawn conversations of the official packages; `python -m tools.fuzz.conversations` holds thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.drawn_conversations import APIS, FAMILIES
from tools.fuzz.conversations import converse

SEED = 7


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_packages_send_is_answered_and_sent_back(tmp_path: Path, family: str) -> None:
    found = await converse(tmp_path, family, range(30), SEED)
    assert found.wrong == []
    assert all(found.tried[f"{api} turns"] for api in APIS)
    assert any(rule.startswith("refused: ") for rule in found.tried)
