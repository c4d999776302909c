"""What one operation on the link moves at most, and that the operations of a move share it out."""

from __future__ import annotations

import msgspec
import pytest

from protocol.messages import NO_HOT_BUFFER
from protocol.units import PAGE_TOKENS
from tests.support.fakes.coordinator import Life
from tests.support.worker_rig import SETTINGS, Rig
from worker.loop import swap
from worker.loop.swap import PIECE_BYTES, PIECE_TOKENS, piece_tokens

#: Three pages, the last of them not full.
PROMPT = 2 * PAGE_TOKENS + 42
OUTPUT = 12


@pytest.mark.parametrize("token_bytes", [1, 656, 8_191, 8_192, 8_193, 61 * 656])
def test_an_operation_moves_whole_pages_up_to_the_larger_bound(token_bytes: int) -> None:
    tokens = piece_tokens(token_bytes)
    assert tokens % PAGE_TOKENS == 0
    if tokens > PIECE_TOKENS:
        assert PIECE_BYTES - PAGE_TOKENS * token_bytes < tokens * token_bytes <= PIECE_BYTES
    else:
        assert tokens == PIECE_TOKENS
        assert (PIECE_TOKENS + PAGE_TOKENS) * token_bytes > PIECE_BYTES


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A worker whose operations move 64 tokens each, and whose prompts of up to 256 tokens are one chunk."""
    monkeypatch.setattr(swap, "PIECE_TOKENS", PAGE_TOKENS)
    monkeypatch.setattr(swap, "PIECE_BYTES", 1)
    return Rig(settings=msgspec.structs.replace(SETTINGS, pass_tokens=256))


def forget(rig: Rig) -> None:
    """Rows and index keys on the device are gone: what is not loaded again is wrong."""
    rig.executor.state.rows.zero_()
    rig.executor.state.index_keys.zero_()


def admit(rig: Rig, hot_slots: int, shared: tuple[int, ...] = ()) -> Life:
    life = rig.coordinator.create(1, PROMPT, OUTPUT, seed=1)
    life.shared = shared
    assert rig.coordinator.admit(life, hot_slots)
    return life


@pytest.mark.parametrize("hot_slots", [0, 64, 192])
def test_every_operation_of_a_staged_prompt_moves_its_rows(rig: Rig, hot_slots: int) -> None:
    """Decode steps read them from host memory, or behind a load of them."""
    life = admit(rig, NO_HOT_BUFFER)
    rig.run()
    forget(rig)
    assert life.durable == PROMPT
    assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("hot_slots", [0, 64, 192])
def test_every_operation_of_a_resume_moves_its_rows(rig: Rig, hot_slots: int) -> None:
    life = admit(rig, 64)
    rig.run_until(lambda: life.durable > PROMPT)
    rig.coordinator.withdraw(life, "keep")
    rig.run()
    assert life.durable % PAGE_TOKENS
    forget(rig)
    assert rig.coordinator.admit(life, hot_slots)
    rig.run()
    assert not rig.wrong()
    rig.check_end()


@pytest.mark.parametrize("hot_slots", [0, 64])
def test_every_operation_of_a_shared_prefix_moves_its_rows(rig: Rig, hot_slots: int) -> None:
    donor = admit(rig, NO_HOT_BUFFER)
    rig.run()
    forget(rig)
    sharer = admit(rig, hot_slots, tuple(donor.host_pages[:2]))
    rig.run()
    assert sharer.outcome == "length"
    assert not rig.wrong()
