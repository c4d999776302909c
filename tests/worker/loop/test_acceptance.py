"""Lives of one request whose steps take 1 + n rows, against plain decoding: tokens, rows, bounds and memory.

The device is a hash: a row depends on the rows before it and on its token, and draws a token from that. A row whose
draft is wrong, or whose selection did not fit, leaves other bytes. Steps are read late, backups run later still, and
drafts are right or wrong as the seed says. A request may leave at any moment and come back to a model that draws
otherwise, so that known tokens are not what it would draw.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

import numpy as np
import pytest

from protocol.messages import Sampling
from protocol.text import ByteTokenizer
from tests.support import accepted_rows as rule
from tests.support.accepted_rows import NOTHING_DRAWN, accepted_rows
from worker.device.hot_buffer import HotBuffer
from worker.device.step_rows import StepRows
from worker.loop import acceptance
from worker.loop.acceptance import RowProgress, StepProgress, drafts_in_step, drafts_kept
from worker.loop.batch import RunningRequest, SeatMemory, Status
from worker.loop.output import Output

EOS = 256
#: Lives that are drawn, and those within which a planted bug must be found: each is found within 25.
SEEDS = range(300)
MUTANT_SEEDS = range(150)
TURNS_MAX = 2_000


def hashed(*values: int) -> int:
    return crc32(np.asarray(values, np.int64).tobytes())


def drawn_from(row: int, model: int) -> int:
    """The token that a row draws: a letter of four, or the end in one of 40."""
    token = hashed(row, model) % 40
    return ord("a") + token % 4 if token else EOS


class Device:
    """One placement on its worker. `known` are tokens of the prompt, of earlier placements, and drawn by rows that
    hold; `rows` was written by position, `host` is the request's, `late` are backups that have not run."""

    def __init__(
        self, chance: random.Random, known: list[int], host: dict[int, int], position: int, model: int
    ) -> None:
        self.chance, self.known, self.host, self.position, self.model = chance, known, host, position, model
        self.rows = [host[place] for place in range(position)]
        self.first, self.steps, self.stop = position, 0, position
        self.late: deque[tuple[int, int, list[int]]] = deque()

    def step(self, sizes: StepRows, tail_slots: int, rows_max: int) -> tuple[list[int], int]:
        """Run a step: what its rows drew, and how many of them hold."""
        self.back_up(self.steps - sizes.backup_steps(tail_slots))
        first, count = self.position, min(sizes.rows, rows_max - self.position)
        admitted = self.chance.choice((1, count, count, count))
        fed, drawn = [], []
        del self.rows[first:]
        for row in range(first, first + count):
            retired = row - tail_slots
            assert retired < self.first or self.host.get(retired) == self.rows[retired], "retired before its backup"
            fed.append(self.known[row] if row < len(self.known) else self._draft(drawn[-1]))
            held = row - first < admitted
            self.rows.append(hashed(fed[-1], *self.rows) if held else hashed(-1, *self.rows))
            drawn.append(drawn_from(self.rows[-1], self.model))
        known = min(max(1, len(self.known) - first), count)
        accepted = rule.accepted_rows(fed, drawn, known, admitted)
        assert accepted >= min(known, admitted), "a known token was refused"
        self.known += drawn[max(0, len(self.known) - first - 1) : accepted]
        self.late.append((self.steps, first, self.rows[first:]))
        self.stop, self.steps, self.position = max(self.stop, first + count), self.steps + 1, first + accepted
        return drawn, accepted

    def _draft(self, right: int) -> int:
        return right if self.chance.random() < 0.7 else ord("z")

    def back_up(self, number: int) -> None:
        """Backups of the steps up to `number` run."""
        while self.late and self.late[0][0] <= number:
            _, first, rows = self.late.popleft()
            self.host.update(enumerate(rows, first))


class Flight:
    """A step that was launched and not read, or not seen in host memory."""

    def __init__(self, number: int, progress: StepProgress, drawn: list[int], accepted: int) -> None:
        self.number, self.progress, self.drawn, self.accepted = number, progress, drawn, accepted


class Life:
    """A request from its prompt to its end, over several placements."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.sizes, self.lookahead = StepRows(chance.randrange(5)), chance.randrange(2)
        self.tail_slots = chance.randint(2 * self.sizes.rows, 16)
        self.prompt = [ord("p")] * chance.randrange(1, 6)
        stop = ("".join(chance.choices("abcd", k=chance.randrange(1, 5))),) if chance.random() < 0.5 else ()
        self.sampling = Sampling(max_tokens=chance.randrange(1, 40), stop=stop, ignore_eos=chance.random() < 0.5)
        self.models: list[int] = []  # which drew each token of the output
        self.host: dict[int, int] = {}
        self.parked, self.delivered = 0, 0
        row: list[int] = []
        for token in self.prompt:
            row.append(hashed(token, *row))
        self.host.update(enumerate(row))
        output = self._output([])
        output.extend(0, [drawn_from(row[-1], 0)])
        output.take_publishable()
        self._place(output, len(row), 0)

    def run(self) -> Output:
        for _ in range(TURNS_MAX):
            if self.request.output.finished:
                return self.request.output
            self._turn()
        raise AssertionError("nothing more happens")

    def _output(self, generated: Sequence[int], first: int = -1) -> Output:
        return Output(generated, self.sampling, (EOS,), ByteTokenizer().detokenizer, first)

    def _place(self, output: Output, rows: int, model: int) -> None:
        self.models = [*self.models[: len(output.tokens)], *[model] * (len(output.tokens) - len(self.models))]
        self.request = RunningRequest(
            placement=model,
            request_index=0,
            seat=0,
            prompt=np.asarray(self.prompt, np.int32),
            output=output,
            memory=SeatMemory([0], [0], [], HotBuffer(64, (0, 1)), 64, 2),
            status=Status.RUNNING,
            progress=RowProgress(rows, rows, rows, self.sizes.rows),
            prefilled=len(self.prompt),
        )
        self.device = Device(self.chance, self.prompt + output.tokens, self.host, rows, model)
        self.unread: deque[Flight] = deque()
        self.undurable: deque[Flight] = deque()
        self._grant()

    def _grant(self) -> None:
        """Room for some more rows: as many as pages that were granted give."""
        progress = self.request.progress
        progress.rows_max = min(self.request.rows_wanted, progress.rows_max + self.chance.randrange(1, 12))
        progress.rows_max = max(progress.rows_max, min(progress.settled + 1, self.request.rows_wanted))

    def _turn(self) -> None:
        if self.chance.random() < 0.1:
            self._come_back()
        if self.request.starved:
            assert self.device.position == self.request.progress.rows_max, "parked with room"
            self.parked += 1
            self._grant()
        self._see_durable()
        launches = self.request.progress.has_room
        assert launches or self.unread, "waits for nothing"
        if launches:
            self._launch()
        while len(self.unread) > self.lookahead * launches and not self.request.output.finished:
            self._read()

    def _launch(self) -> None:
        progress, number = self.request.progress, self.device.steps
        step = acceptance.StepProgress([progress])
        drawn, accepted = self.device.step(self.sizes, self.tail_slots, progress.rows_max)
        flight = Flight(number, step, drawn, accepted)
        self.unread.append(flight)
        self.undurable.append(flight)
        assert progress.certain <= self.device.position
        assert self.device.stop <= progress.position <= progress.rows_max

    def _read(self) -> None:
        flight, output = self.unread.popleft(), self.request.output
        (first,) = flight.progress.read([flight.accepted])
        place, tokens = first + 1 - len(self.prompt), flight.drawn[: flight.accepted]
        known = len(output.tokens)
        taken = output.extend(place, tokens)
        assert len(output.tokens) == known + taken
        self.models += [self.device.model] * taken
        output.take_publishable()
        if not self.unread:
            progress = self.request.progress
            assert progress.settled == progress.certain == progress.position == self.device.position

    def _see_durable(self) -> None:
        """Some backups run, and some of those are seen."""
        self.device.back_up(self.chance.randrange(-1, self.device.steps + 1))
        run = self.device.late[0][0] if self.device.late else self.device.steps
        while self.undurable and self.undurable[0].number < run and self.chance.random() < 0.7:
            self.undurable.popleft().progress.note_durable()
        self._check_rows(self.request.progress.durable)

    def _come_back(self) -> None:
        """It leaves with steps in flight that are not read, and resumes: on what it reported, or on all of its rows."""
        output, request, first = self.request.output, self.request, -1
        if self.chance.random() < 0.5:
            self.device.back_up(self.device.steps)
            rows, first = request.left_behind(request.position)  # type: ignore[assignment]
        else:
            rows = request.durable()
        if not rows:
            return
        self._check_rows(rows)
        self.delivered = output.published
        self._place(self._output(output.tokens[: output.published], first), rows, self.device.model + 1)

    def _check_rows(self, count: int) -> None:
        """Rows below `count` are in host memory, and are those of plain decoding."""
        rows: list[int] = []
        for place, token in enumerate(self.device.known[:count]):
            rows.append(hashed(token, *rows))
            assert self.host.get(place) == rows[place], f"row {place} of {count} is not durable"

    def check(self) -> None:
        """The output is what plain decoding gives with the models that drew it, and no row lies past the overshoot."""
        output, plain, rows = self.request.output, self._output([]), list[int]()
        for token in self.prompt:
            rows.append(hashed(token, *rows))
        for model in self.models:
            assert not plain.finished
            plain.extend(len(plain.tokens), [drawn_from(rows[-1], model)])
            rows.append(hashed(plain.tokens[-1], *rows))
        assert (plain.tokens, plain.reason) == (output.tokens, output.reason)
        published = max(plain.generated_tokens, self.delivered)  # another model may go on with a stop string
        assert output.generated_tokens == output.published == published
        assert output.tail_text == plain.tail_text
        most = len(self.prompt) + len(output.tokens) - 1 + self.sizes.overshoot_tokens(self.lookahead)
        assert self.device.stop <= most, "a row past the overshoot"


def lives(seeds: Iterable[int]) -> list[Life]:
    found = []
    for seed in seeds:
        life = Life(seed)
        life.run()
        life.check()
        found.append(life)
    return found


def test_outputs_are_those_of_plain_decoding() -> None:
    done = lives(SEEDS)
    assert {life.request.output.reason for life in done} == {"eos", "stop", "length"}
    assert sum(life.parked for life in done) > 100
    assert sum(life.device.model for life in done) > 100  # placements behind the first


@pytest.mark.parametrize(
    ("fed", "drawn", "known", "admitted", "accepted"),
    [
        ("a", "b", 1, 1, 1),  # plain decoding
        ("abc", "bcd", 1, 3, 3),
        ("abx", "bcd", 1, 3, 2),
        ("axc", "bcd", 1, 3, 1),  # a draft behind a wrong one was right by chance
        ("abc", "bcd", 1, 2, 2),
        ("xyz", "bcd", 3, 3, 3),  # known tokens, which the model would not draw
        ("xyz", "bcd", 3, 1, 1),
        ("xyd", "bcd", 2, 3, 2),
        ("xyc", "bcd", 2, 3, 3),
    ],
)
def test_rows_hold_up_to_the_first_wrong_draft(fed: str, drawn: str, known: int, admitted: int, accepted: int) -> None:
    assert accepted_rows(fed.encode(), drawn.encode(), known, admitted) == accepted


def test_row_without_a_mask_does_not_hold() -> None:
    assert accepted_rows((5,), (NOTHING_DRAWN,), 1, 1) == 0


@pytest.mark.parametrize("draft_tokens", range(5))
def test_known_tokens_go_as_many_at_once_as_a_step_has_rows(draft_tokens: int) -> None:
    chance, rows = random.Random(draft_tokens), StepRows(draft_tokens)
    chance.choice = lambda choices: choices[-1]  # type: ignore[method-assign, assignment]
    device = Device(chance, list(range(21)), {0: 0}, 1, 0)
    while device.position < 20:
        device.step(rows, 16, 100)
    assert device.steps == -(-19 // rows.rows)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_plain_decoding_is_one_row_a_step(lookahead: int) -> None:
    plain = StepRows()
    assert (plain.rows, plain.overshoot_tokens(lookahead)) == (1, lookahead)
    assert [plain.backup_steps(tail_slots) for tail_slots in (1, 8, 16)] == [1, 8, 16]


def counts_rejected_rows_as_durable(patch: pytest.MonkeyPatch) -> None:
    note_durable = StepProgress.note_durable

    def note_all(step: StepProgress) -> None:
        note_durable(step)
        for it in step._progress:
            it.durable = max(it.durable, it.position)

    patch.setattr(StepProgress, "note_durable", note_all)


def counts_rows_as_durable_that_no_fence_covers(patch: pytest.MonkeyPatch) -> None:
    read = StepProgress.read

    def read_and_count(step: StepProgress, accepted: Sequence[int]) -> list[int]:
        firsts = read(step, accepted)
        step._progress[0].durable = step._progress[0].settled
        return firsts

    patch.setattr(StepProgress, "read", read_and_count)


def publishes_rejected_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "accepted_rows", lambda fed, drawn, known, admitted: admitted)


def accepts_what_was_not_admitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "accepted_rows", lambda fed, drawn, known, _: accepted_rows(fed, drawn, known, len(fed)))


def refuses_known_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rule, "accepted_rows", lambda fed, drawn, _, admitted: accepted_rows(fed, drawn, 1, admitted))


def goes_on_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    def extend(output: Output, place: int, tokens: Sequence[int], rows: Sequence[bytes] = ()) -> int:
        for token in tokens[max(0, output.forced - place) :]:
            output.push(token)
        return len(tokens[max(0, output.forced - place) :])

    patch.setattr(Output, "extend", extend)


def takes_known_tokens_twice(patch: pytest.MonkeyPatch) -> None:
    extend = Output.extend
    patch.setattr(Output, "extend", lambda output, place, tokens: extend(output, max(place, output.forced), tokens))


def keeps_the_upper_bound(patch: pytest.MonkeyPatch) -> None:
    settle = RowProgress.settle

    def settle_alone(progress: RowProgress, accepted: int, rows: int = 0) -> None:
        position = progress.position
        settle(progress, accepted, rows)
        progress.position = position

    patch.setattr(RowProgress, "settle", settle_alone)


def parks_by_the_upper_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowProgress, "certain", property(lambda progress: progress.position))


def waits_for_steps_as_if_of_one_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRows, "backup_steps", lambda _, tail_slots: tail_slots)


def waits_one_step_less(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRows, "backup_steps", lambda sizes, tail_slots: tail_slots // sizes.rows + 1)


def forgets_drafts_in_the_overshoot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRows, "overshoot_tokens", lambda _, lookahead_steps: lookahead_steps)


def forgets_drafts_of_the_last_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepRows, "overshoot_tokens", lambda sizes, lookahead_steps: lookahead_steps * sizes.rows)


@pytest.mark.parametrize(
    "plant",
    [
        counts_rejected_rows_as_durable,
        counts_rows_as_durable_that_no_fence_covers,
        publishes_rejected_rows,
        accepts_what_was_not_admitted,
        refuses_known_tokens,
        goes_on_behind_the_end,
        takes_known_tokens_twice,
        keeps_the_upper_bound,
        parks_by_the_upper_bound,
        waits_for_steps_as_if_of_one_row,
        waits_one_step_less,
        forgets_drafts_in_the_overshoot,
        forgets_drafts_of_the_last_step,
    ],
)
def test_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in MUTANT_SEEDS:
        try:
            lives([seed])
        except AssertionError:
            print("found by seed", seed)
            return
    raise AssertionError("no life shows it")


def test_drafts_of_a_step_are_told_by_depth() -> None:
    """Two rows of known tokens, then two drafts, of which one holds; none known, and none that holds."""
    assert drafts_in_step(3, 2, 1) == (range(2, 4), range(2, 3))
    assert drafts_in_step(1, 4, 0) == (range(1, 5), range(1, 1))
    assert drafts_in_step(0, 0, 0) == (range(0), range(0))


@pytest.mark.parametrize(("right", "surplus", "kept"), [(3, 0, 3), (3, 1, 3), (3, 2, 2), (3, 4, 0), (1, 4, 0)])
def test_drafts_past_the_end_are_not_counted(right: int, surplus: int, kept: int) -> None:
    """The last row's own draw was not drafted."""
    assert drafts_kept(right, surplus) == kept


@pytest.mark.parametrize("is_durable_first", [True, False])
def test_step_of_one_row_behind_one_of_many_is_counted_durable(is_durable_first: bool) -> None:
    """Where the number of drafts changes between two steps in flight."""
    progress = RowProgress(settled=10, position=10, durable=10, step_rows=5, rows_max=100)
    first, second = StepProgress([progress], 5), StepProgress([progress], 1)
    first.read([3])
    first.note_durable()
    for told in (second.note_durable, lambda: second.read([1]))[:: 1 if is_durable_first else -1]:
        told()
    assert (progress.settled, progress.durable, progress.position) == (14, 14, 14)
