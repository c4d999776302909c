"""What the demo does to its requests, against an imaginary service on a virtual clock."""

from __future__ import annotations

from typing import Any

from trio.testing import MockClock

from hisparse.demo.plan import DemoOptions, DemoRequest
from hisparse.demo.scenario import RELEASE_LIMIT_S, RETRACTED_FOR_S, run_scenario
from hisparse.demo.watch import Outcome
from tests.support.fakes.service import PAGES_EACH, FakeService

REQUESTS = [DemoRequest(f"demo-{i:02}", "a.py", tuple(range(100 + i))) for i in range(8)]


async def played(service: Any) -> tuple[Outcome, list[str]]:
    outcome, events = Outcome(), list[str]()
    await run_scenario(service, REQUESTS, DemoOptions(), outcome, events.append)
    return outcome, events


async def test_scenario_retracts_a_request_and_drains_a_worker(autojump_clock: MockClock) -> None:
    service = FakeService()
    outcome, events = await played(service)
    assert [len(tokens) for tokens in outcome.tokens.values()] == [128] * 8
    assert all(tokens == list(range(128)) for tokens in outcome.tokens.values())
    (retract, drain, resume) = service.said
    assert retract[:2] == ("retract", outcome.retracted[0])
    assert resume[1] == retract[1]
    assert float(str(resume[2])) - float(str(retract[2])) >= RETRACTED_FOR_S
    home = outcome.watch.workers_of[outcome.retracted[0]][0]
    assert drain == ("drain", "w1" if home == "w0" else "w0", True)
    assert len(outcome.handed_over) == 4  # the other four ran where the retracted one did
    assert any("retracted from" in event for event in events)
    assert outcome.watch.rows[outcome.retracted[0]].retractions == 1


async def test_scenario_hands_over_rest_when_only_one_worker_runs(
    autojump_clock: MockClock,
) -> None:
    """A worker that has finished before the other one is in mid-decode leaves the demo something to show."""
    service = FakeService(ahead="w0")
    outcome, _ = await played(service)
    home, elsewhere = outcome.watch.workers_of[outcome.retracted[0]]
    assert (home, elsewhere) == ("w1", "w0")
    assert service.said[1] == ("drain", "w1", True)
    assert len(outcome.handed_over) == 3
    assert [len(tokens) for tokens in outcome.tokens.values()] == [128] * 8


async def test_pages_are_counted_before_at_peak_and_after(autojump_clock: MockClock) -> None:
    outcome, _ = await played(FakeService())
    assert outcome.host_pages_before == outcome.host_pages_after == 0
    assert outcome.watch.host_pages_peak == 8 * PAGES_EACH


async def test_leak_is_reported_after_a_bounded_wait(autojump_clock: MockClock) -> None:
    service = FakeService(leak=3)
    outcome, _ = await played(service)
    assert outcome.host_pages_after == 3
    assert autojump_clock.current_time() > RELEASE_LIMIT_S


async def test_early_ended_requests_are_not_moved(autojump_clock: MockClock) -> None:
    outcome, events = await played(FakeService(step_s=0.0001))
    assert (outcome.retracted, outcome.handed_over) == ([], ())
    assert [len(tokens) for tokens in outcome.tokens.values()] == [128] * 8
    assert events == []


async def test_refused_move_is_reported_and_the_rest_continues(autojump_clock: MockClock) -> None:
    outcome, events = await played(FakeService(refuse_retract=True))
    assert outcome.retracted == []
    (event,) = events
    assert event.startswith("not moved: request_id=demo-")
    assert [len(tokens) for tokens in outcome.tokens.values()] == [128] * 8
