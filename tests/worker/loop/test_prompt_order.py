"""Composed passes: shares of owners, short prompts first, long ones in the end, and what preempts a pass."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from protocol.units import PAGE_TOKENS, pages_for
from worker.device.passes import PARTS_MAX
from worker.loop.prompt_order import AGING_TOKENS, PromptOrder, Taken, WaitingPrompt

PASS = 8_192
#: Pages of a slab that bounds no pass.
SLAB = 1 << 20


def waiting(number: int, tokens: int, owner: str = "one", *, start: int = 0, waited_s: float = 0.0) -> WaitingPrompt:
    return WaitingPrompt(number, owner, start, start + tokens, waited_s)


def test_shortest_prompt_goes_first_and_others_are_packed_behind() -> None:
    prompts = [waiting(1, 3_000), waiting(2, 500), waiting(3, 2_000)]
    assert PromptOrder().compose(prompts, PASS, SLAB) == [Taken(2, 0, 500), Taken(3, 0, 2_000), Taken(1, 0, 3_000)]


def test_long_prompt_alone_fills_the_pass_and_goes_on_behind_it() -> None:
    order = PromptOrder()
    assert order.compose([waiting(1, 100_000)], PASS, SLAB) == [Taken(1, 0, PASS)]
    assert order.compose([waiting(1, 90_000, start=10_000)], 100, SLAB) == [Taken(1, 10_000, 10_048)]
    assert order.compose([waiting(1, 90_000, start=64)], PAGE_TOKENS - 1, SLAB) == []


def test_short_prompt_waits_for_as_many_tokens_of_a_long_one_as_it_has() -> None:
    taken = PromptOrder().compose([waiting(1, 100_000), waiting(2, 1_000)], PASS, SLAB)
    assert taken == [Taken(2, 0, 1_000), Taken(1, 0, 960)]


def test_owner_has_no_more_of_a_pass_than_twice_what_another_owner_has() -> None:
    short, long = [waiting(1, 300, "few")], [waiting(number, 250, "many") for number in range(2, 40)]
    taken = PromptOrder().compose(short + long, PASS, SLAB)
    assert sorted(it.prompt for it in taken) == [1, 2, 3]
    assert PromptOrder().compose([waiting(1, 3, "few"), waiting(2, 602, "many")], PASS, SLAB) == [Taken(1, 0, 3)]
    alike = [waiting(number, 3 + number, f"owner {number}") for number in range(20)]
    assert len(PromptOrder().compose(alike, PASS, SLAB)) == 20
    assert len(PromptOrder().compose(long, PASS, SLAB)) == -(-PASS // 250), "an owner alone fills it"


def test_shorter_prompt_preempts_the_pass_of_an_owner_whose_turn_it_is() -> None:
    """It is not packed behind prompts that are many times as long."""
    order = PromptOrder()
    prompts = [waiting(1, 3, "few"), waiting(2, 602, "many")]
    order.compose(prompts, PASS, SLAB)
    order.took("few", 1_000)
    assert order.compose(prompts, PASS, SLAB) == [Taken(2, 0, 602)]
    assert order.preempting(prompts[:1], (602,), 602, 602, SLAB) == [Taken(1, 0, 3)]
    longer = [waiting(1, 600, "few"), *(waiting(number, 500, "many") for number in range(2, 9))]
    assert Taken(1, 0, 600) in order.compose(longer, PASS, SLAB), "it could not preempt that one"


def test_waiting_makes_prompts_shorter() -> None:
    seconds = 2_000 / AGING_TOKENS
    taken = PromptOrder(packs=False).compose([waiting(1, 2_500, waited_s=seconds + 1), waiting(2, 600)], PASS, SLAB)
    assert taken == [Taken(1, 0, 2_500)]


def test_owners_share_and_an_owner_that_comes_later_owes_nothing() -> None:
    order, done = PromptOrder(packs=False), Counter[str]()
    for number in range(40):
        prompts = [waiting(2 * number + place, 1_000, owner) for place, owner in enumerate(("many", "few"))]
        prompts += [waiting(1_000 + number + extra, 1_000, "many") for extra in range(50)]
        (taken,) = order.compose(prompts, 1_000, SLAB)
        owner = next(it.owner for it in prompts if it.prompt == taken.prompt)
        order.took(owner, taken.stop - taken.start)
        done[owner] += 1
    assert done == {"many": 20, "few": 20}
    newcomer = [waiting(1, 1_000, "new"), waiting(2, 1_000, "many")]
    for _ in range(4):
        (taken,) = order.compose(newcomer, 1_000, SLAB)
        order.took("new" if taken.prompt == 1 else "many", 1_000)
        done["new"] += taken.prompt == 1
    assert done["new"] == 2


def test_pages_and_parts_of_a_pass_are_bounded() -> None:
    """A part takes pages for all rows up to where it stops; what does not fit waits for the next pass."""
    long = [waiting(number, 10 + number, start=6_400) for number in range(8)]
    assert PromptOrder().compose(long, PASS, 3 * 101 - 1) == [Taken(0, 6_400, 6_410), Taken(1, 6_400, 6_411)]
    mixed = [waiting(0, 10), waiting(1, 20, start=6_400), waiting(2, 30)]
    assert PromptOrder().compose(mixed, PASS, 101) == [Taken(0, 0, 10), Taken(2, 0, 30)]
    assert len(PromptOrder().compose([waiting(number, 1) for number in range(300)], PASS, SLAB)) == PARTS_MAX


def test_first_in_the_order_waits_for_its_pages_and_no_other_goes_before_it() -> None:
    """vLLM: chunked prefill in livelock. Short prompts that keep coming would take the pages that are given back."""
    order, long, short = PromptOrder(), waiting(1, 10, start=6_400), waiting(2, 30)
    assert order.compose([long, short], PASS, 100) == []
    assert order.compose([long, short], PASS, 102) == [Taken(1, 6_400, 6_410), Taken(2, 0, 30)]
    assert order.preempting([long, short], (100,), 5_000, PASS, 100) == []


def test_one_prompt_a_pass_where_nothing_is_packed() -> None:
    assert PromptOrder(packs=False, unit_tokens=512).compose([waiting(1, 700), waiting(2, 9_000)], 512, SLAB) == [
        Taken(1, 0, 512)
    ]


def test_shorter_prompts_that_end_preempt() -> None:
    order = PromptOrder()
    prompts = [waiting(1, 1_000), waiting(2, 200), waiting(3, 50_000)]
    taken = order.preempting(prompts, open_tokens=(128_000,), rows_left=5_000, tokens=PASS, pages=SLAB)
    assert taken == [Taken(2, 0, 200), Taken(1, 0, 1_000)]
    assert order.preempting(prompts, (150,), 5_000, PASS, SLAB) == []  # what is under way is shorter
    assert order.preempting(prompts, (128_000,), 300, PASS, SLAB) == [Taken(2, 0, 200)]  # the rest is over soon
    assert order.preempting(prompts, (128_000,), 5_000, 0, SLAB) == []  # it was preempted enough


SIZES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 500), st.integers(1, 3_000)), min_size=1, max_size=30)


@given(SIZES, st.integers(PAGE_TOKENS, 4_096), st.integers(pages_for(500 * PAGE_TOKENS + 3_000), 2_000))
def test_every_prompt_is_taken_once_in_order_and_passes_are_not_larger(
    sizes: list[tuple[int, int, int]], tokens: int, pages: int
) -> None:
    order = PromptOrder()
    left = {
        number: WaitingPrompt(number, f"owner {owner}", start * PAGE_TOKENS, start * PAGE_TOKENS + count)
        for number, (owner, start, count) in enumerate(sizes)
    }
    while left:
        taken = order.compose(list(left.values()), tokens, pages)
        assert taken
        assert sum(pages_for(it.stop) for it in taken) <= pages
        assert sum(it.stop - it.start for it in taken) <= tokens
        for prompt, start, stop in taken:
            before = left.pop(prompt)
            assert before.start == start < stop <= before.stop
            assert stop == before.stop or stop % PAGE_TOKENS == 0
            order.took(before.owner, stop - start)
            if stop < before.stop:
                left[prompt] = WaitingPrompt(prompt, before.owner, stop, before.stop)
