"""The checker sees each durable field of a request that a replay would drop."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.journal.state import JournalState, RequestRecord, replay
from tests.sim import checker
from tests.sim.checker import DURABLE
from tests.sim.run import simulate
from tests.support.facts import make_facts

#: A seed in whose replays all fields but two have something to lose.
SEED = 3
#: No client of the simulation asks for a grammar, and first tokens are rarely kept: test_recovery.py and test_state.py
#: replay them.
NOT_DRAWN = {"grammar", "first_token"}


@pytest.mark.parametrize("name", sorted(DURABLE - NOT_DRAWN))
def test_field_that_a_replay_drops_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*given: Any) -> JournalState:
        state = replay(*given)
        for request in state.requests.values():
            other = make_facts(0, 1) if name == "facts" else request.facts
            setattr(request, name, getattr(RequestRecord(other), name))
        return state

    monkeypatch.setattr(checker, "replay", forgetful)
    violation = simulate(SEED).violation
    assert violation is not None
    assert str(violation).startswith(f"durable: {name} of "), violation
