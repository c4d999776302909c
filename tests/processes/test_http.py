"""OpenAI's own client against real processes: front, coordinator, worker. Deterministic: every text is known.

Tests that kill a process of the cluster have one beside the run's standing one.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import openai
import pytest

from hisparse.client.client import Client
from protocol.errors import NotFound
from protocol.logprobs import TokenLogprobs
from protocol.messages import HistoryLine, RequestRow, Sampling
from tests import ROOT
from tests.processes.test_up import eventually, running
from tests.support.http_rig import TEMPLATE
from tests.support.standing import CHAT, CHAT_MODEL, KEYS, SEATS, Guest, Standing, guest, write_keys

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

#: Of one answer, on a machine whose cores are busy.
LIMIT_S: Final = 240.0
MODEL: Final = CHAT_MODEL
GREEDY: Final[dict[str, Any]] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}

#: Many seconds of decode steps: what a test does to such a request comes before its end.
ENDLESS_TOKENS: Final = 1_800
#: Requests of a batch that begin before one of another key that came later: one turn.
TURNS_AHEAD_MAX: Final = 1

T = TypeVar("T")


@dataclass
class Site:
    guest: Guest

    @property
    def up(self) -> Standing:
        return self.guest.cluster

    def client(self, url: str = "", key: str = "") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{url or self.guest.url}/v1",
            api_key=key or self.guest.key,
            max_retries=0,
            timeout=LIMIT_S,
            http_client=openai.DefaultHttpxClient(event_hooks=self.guest.hooks),
        )

    def text(self, prompt: str, tokens: int) -> str:
        """The whole answer, and the very same as the coordinator's own client gets."""
        answer = self.client().completions.create(prompt=prompt, max_tokens=tokens, **GREEDY)
        assert answer.choices[0].text == self.tokens(prompt.encode(), tokens).decode()
        return answer.choices[0].text

    def tokens(self, prompt: Sequence[int], tokens: int) -> bytes:
        async def submit(client: Client) -> list[int]:
            stream = await client.submit(list(prompt), Sampling(tokens, ignore_eos=True))
            self.guest.ids.append(stream.request_id)
            return (await stream.collect()).tolist()

        return bytes(self.ask(submit))

    def front_pid(self) -> int:
        """The present one's."""
        return int(json.loads((self.up.runtime_dir / "ready.json").read_text())["http"]["pid"])

    def answers(self) -> bool:
        try:
            return bool(self.client().models.list().data)
        except (openai.APIConnectionError, openai.InternalServerError):
            return False

    def ask(self, action: Callable[[Client], Awaitable[T]]) -> T:
        return self.up.ask(action)

    def row(self, request_id: str) -> RequestRow:
        async def describe(client: Client) -> RequestRow:
            return (await client.request(request_id)).row

        return self.ask(describe)

    def began(self, request_id: str) -> tuple[float, float]:
        """When it was submitted and first admitted, in seconds since 1970; infinite: not yet."""

        async def describe(client: Client) -> Sequence[HistoryLine]:
            return (await client.request(request_id)).history

        history = self.ask(describe)
        return history[0].at_s, next((line.at_s for line in history if line.state == "PREFILLING"), math.inf)

    def ran(self, request_id: str) -> tuple[float, float]:
        """When its decode began, and when it ended, in seconds since 1970; infinite: not yet."""

        async def describe(client: Client) -> Sequence[HistoryLine]:
            return (await client.request(request_id)).history

        history = self.ask(describe)
        began, ended = (
            next((line.at_s for line in history if line.state in states), math.inf)
            for states in (("RUNNING",), ("FINISHED", "ABORTED", "FAILED"))
        )
        return began, ended

    def rows(self) -> int:
        """How many requests of the test the coordinator knows."""

        async def count(client: Client) -> int:
            return sum(self.guest.is_own(row.request_id) for row in (await client.requests()).rows)

        return self.ask(count)

    @contextmanager
    def another_front(self, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """A second `hisparse http` before the same coordinator, and its address."""
        command = [sys.executable, "-m", "hisparse.cli", "http", "--port", "0", "--api-keys", str(self.up.place / KEYS)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--runtime-dir", str(self.up.runtime_dir)], cwd=ROOT, env=os.environ, stderr=file
            )
        try:
            eventually(lambda: "connected" in log.read_text() and "listening" in log.read_text())
            found = re.search(r"listening url=(\S+)", log.read_text())
            assert found is not None
            yield process, found[1]
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def site(chat_cluster: Standing) -> Iterator[Site]:
    """The run's standing cluster."""
    with guest(chat_cluster) as found:
        yield Site(found)


@pytest.fixture
def lone_site(chat_cluster: Standing) -> Iterator[Site]:
    """With all of its seats."""
    with guest(chat_cluster, alone=True) as found:
        yield Site(found)


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    """A cluster for the tests of this module that kill its processes."""
    model = tmp_path_factory.mktemp("checkpoint") / "model"
    model.mkdir()
    CHAT.write_model(model)
    place = tmp_path_factory.mktemp("up")
    with running(model, place, *CHAT.options, "--api-keys", str(write_keys(place))) as up:
        yield Standing(place, up.ready)


@pytest.fixture
def own_site(own_cluster: Standing) -> Iterator[Site]:
    with guest(own_cluster) as found:
        yield Site(found)


def streamed(stream: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


# ---------------------------------------------------------------- what ordinary clients do


def test_completion_and_chat_match_the_model(site: Site) -> None:
    site.text("Once upon a time", 24)
    messages: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "héllo 😀"}]
    answer = site.client().chat.completions.create(messages=messages, max_completion_tokens=16, **GREEDY)
    prompt = [256, *b"system:be brief\n", 256, *"user:héllo 😀\n".encode(), 256, *b"assistant:"]
    assert answer.choices[0].message.content == site.tokens(prompt, 16).decode()
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 16)
    assert "assistant" in TEMPLATE


def test_eight_concurrent_streams_get_their_own_text(lone_site: Site) -> None:
    prompts = [f"{number}: " + "tell me more " * number for number in range(8)]
    together = threading.Barrier(len(prompts))

    def begin(prompt: str, tokens: int) -> Any:
        client = lone_site.client()
        together.wait(LIMIT_S)
        options: Any = {"include_usage": True}
        return client.completions.create(
            prompt=prompt, max_tokens=tokens, stream=True, stream_options=options, **GREEDY
        )

    def stream(prompt: str) -> tuple[str, Any]:
        chunks = list(begin(prompt, 32))
        return streamed(chunks), chunks[-1].usage

    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(stream, prompts))
        endless = list(pool.map(partial(begin, tokens=ENDLESS_TOKENS), prompts))
    ids = [it.response.headers["hisparse-request-id"] for it in endless]
    eventually(lambda: all(lone_site.ran(it)[0] < math.inf for it in ids))
    for it in endless:
        it.close()
    spans = [lone_site.ran(it) for it in ids]
    assert max(began_s for began_s, _ in spans) < min(ended_s for _, ended_s in spans), "all ran at the same time"
    assert [text for text, _ in results] == [lone_site.tokens(prompt.encode(), 32).decode() for prompt in prompts]
    usages = [(usage.prompt_tokens, usage.completion_tokens) for _, usage in results]
    assert usages == [(len(prompt), 32) for prompt in prompts]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_text_ends_no_output_before_min_tokens(site: Site, stream: bool) -> None:
    asked: Any = {"logit_bias": {"65": 100}, "extra_body": {"min_tokens": 20}, "stop": ["AAA"], "max_tokens": 40}
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    told = site.client().completions.create(prompt="aim", stream=stream, **options, **GREEDY | asked)
    chunks = list(told) if stream else [told]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "A" * 20
    assert (choices[-1].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", 20)


def test_output_ends_before_the_stop_string(site: Site) -> None:
    whole = site.text("stop me", 32)
    stop = whole[9:12]
    answer = site.client().completions.create(prompt="stop me", max_tokens=32, stop=stop, **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")
    chunks = site.client().completions.create(prompt="stop me", max_tokens=32, stop=[stop], stream=True, **GREEDY)
    assert streamed(chunks) == whole[: whole.index(stop)]


def test_samples_differ_and_a_seed_repeats_them(site: Site) -> None:
    def sample() -> list[str]:
        answer = site.client().completions.create(
            model=MODEL, prompt="draw", max_tokens=24, n=3, seed=11, top_p=0.95, temperature=1.5
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    first = sample()
    assert first == sample()
    assert len(set(first)) == 3


def test_log_probabilities_come_whole_and_streamed_and_are_those_of_the_python_client(site: Site) -> None:
    async def submit(client: Client) -> list[TokenLogprobs]:
        stream = await client.submit(list(b"probable"), Sampling(8, ignore_eos=True, logprobs=3))
        site.guest.ids.append(stream.request_id)
        await stream.collect()
        return stream.logprobs

    own, asked = site.ask(submit), {"prompt": "probable", "max_tokens": 8, "logprobs": 3} | GREEDY
    whole = site.client().completions.create(n=2, **asked).choices
    parts = [chunk.choices[0] for chunk in site.client().completions.create(stream=True, **asked)]
    for told in (whole[0].logprobs, whole[1].logprobs):
        assert told is not None
        assert told.token_logprobs == [it.logprob for it in own], "the same bits, from another run"
        assert [list(it.values())[:3] for it in told.top_logprobs or ()] == [[p for _, p in it.top] for it in own]
    told = [it.logprobs for it in parts if it.logprobs is not None]
    assert whole[0].logprobs is not None
    assert [it for part in told for it in part.tokens or ()] == whole[0].logprobs.tokens
    assert [it for part in told for it in part.text_offset or ()] == whole[0].logprobs.text_offset


def test_log_probabilities_of_a_chat_are_whole_tokens_of_its_text(site: Site) -> None:
    answer = site.client().chat.completions.create(
        messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=8, logprobs=True, top_logprobs=2, **GREEDY
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    data = bytes(byte for it in told.content for byte in it.bytes or ())
    assert data.decode(errors="replace") == answer.choices[0].message.content
    assert [len(it.top_logprobs) for it in told.content] == [2] * 8
    assert all(it.top_logprobs[0].token == it.token for it in told.content), "greedy: the likeliest"


def test_prompts_may_be_many_or_token_ids(site: Site) -> None:
    answer = site.client().completions.create(prompt=[[72, 105], [66]], max_tokens=6, **GREEDY)
    assert [choice.text for choice in answer.choices] == [site.tokens(ids, 6).decode() for ids in ([72, 105], [66])]


def test_the_model_is_listed(site: Site) -> None:
    assert [model.id for model in site.client().models.list()] == [MODEL]
    assert site.client().models.retrieve(MODEL).owned_by == "hisparse"


@pytest.mark.parametrize(
    ("request_of", "kind", "code"),
    [
        ({"model": MODEL, "prompt": ""}, openai.BadRequestError, "bad_input"),
        ({"model": MODEL, "prompt": "x", "logprobs": 21}, openai.BadRequestError, "bad_input"),
        ({"model": MODEL, "prompt": "x", "max_tokens": 100_000}, openai.BadRequestError, "context_length_exceeded"),
        ({"model": MODEL, "prompt": "x", "temperature": -1}, openai.BadRequestError, "bad_input"),
        ({"model": "other", "prompt": "x"}, openai.NotFoundError, "not_found"),
    ],
)
def test_errors_arrive_as_openais(
    site: Site, request_of: dict[str, Any], kind: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        site.client().completions.create(**request_of)
    assert caught.value.code == code
    assert caught.value.param


@pytest.mark.deep
def test_batch_of_one_key_does_not_starve_another(lone_site: Site) -> None:
    """Long outputs on every seat, at the highest priority that the key may ask for, and as many more that wait. Each
    request of the other key is admitted when one of the batch at most has begun since it came."""
    batch = lone_site.client(key=lone_site.guest.other_key)
    with pytest.raises(openai.BadRequestError) as caught:
        batch.completions.create(prompt="batch", model="model", extra_body={"priority": 1})
    assert caught.value.param == "priority"
    streams = [
        batch.completions.create(prompt=f"batch {number}", max_tokens=ENDLESS_TOKENS, stream=True, **GREEDY)
        for number in range(3 * SEATS)
    ]
    try:
        batch_ids = [stream.response.headers["hisparse-request-id"] for stream in streams]
        eventually(lambda: sum(lone_site.row(it).state == "RUNNING" for it in batch_ids) == SEATS)
        for number in range(3):
            stream = lone_site.client().completions.create(
                prompt=f"other {number}", max_tokens=4, stream=True, **GREEDY
            )
            request_id = stream.response.headers["hisparse-request-id"]
            assert streamed(stream)
            came_s, began_s = lone_site.began(request_id)
            assert sum(came_s < lone_site.began(it)[1] < began_s for it in batch_ids) <= TURNS_AHEAD_MAX
        assert {lone_site.row(it).state for it in batch_ids} != {"FINISHED"}, "the batch was there all the time"
        assert any(lone_site.row(it).retractions for it in batch_ids), "its last turn gave its seat up, and is kept"
    finally:
        for stream in streams:
            stream.close()
    eventually(lambda: {lone_site.row(it).state for it in batch_ids} <= {"ABORTED", "FINISHED"})


def test_a_wrong_key_is_refused(site: Site) -> None:
    with pytest.raises(openai.AuthenticationError):
        site.client(key="not-a-valid-key").models.list()


# ---------------------------------------------------------------- what goes wrong


def test_disconnect_aborts_the_request_at_the_coordinator(site: Site) -> None:
    stream = site.client().completions.create(prompt="leave", max_tokens=ENDLESS_TOKENS, stream=True, **GREEDY)
    request_id = next(iter(stream)).id
    stream.close()
    eventually(lambda: site.row(request_id).state == "ABORTED")
    assert site.row(request_id).generated_tokens < ENDLESS_TOKENS


def test_killed_coordinator_only_pauses_the_stream(own_site: Site) -> None:
    """I5: no character twice, none missing, and no error."""
    undisturbed = own_site.text("go on and on", 60)
    stream = own_site.client().completions.create(prompt="go on and on", max_tokens=60, stream=True, **GREEDY)
    pieces = [next(stream).choices[0].text for _ in range(3)]
    os.kill(own_site.up.ready["coordinator"]["pid"], signal.SIGKILL)
    assert "".join(pieces) + streamed(stream) == undisturbed


def test_client_id_is_answered_twice_and_generated_once(site: Site) -> None:
    def answer() -> str:
        headers = {"Idempotency-Key": "order-66"}
        created = site.client().completions.create(prompt="once", max_tokens=20, extra_headers=headers, **GREEDY)
        assert created.id == created._request_id == "order-66"
        return created.choices[0].text

    first = answer()
    known = site.rows()
    assert answer() == first
    assert site.rows() == known
    with pytest.raises(openai.ConflictError):
        site.client().completions.create(
            prompt="another", max_tokens=20, extra_headers={"Idempotency-Key": "order-66"}, **GREEDY
        )


def test_trace_id_is_shared_by_requests(site: Site) -> None:
    """Two bodies, and one of them again, which is another sample: each is found by its own id."""
    ask = partial(site.client().completions.with_raw_response.create, model=MODEL, max_tokens=20, temperature=1)
    raws = [ask(prompt=text, extra_headers={"X-Request-Id": "trace"}) for text in ("once", "twice", "twice")]
    answers = [raw.parse() for raw in raws]
    ids = [answer.id for answer in answers]
    assert [answer._request_id for answer in answers] == ["trace"] * 3
    assert len(set(ids)) == 3
    assert answers[1].choices[0].text != answers[2].choices[0].text
    assert [raw.headers["hisparse-request-id"] for raw in raws] == ids
    assert {site.row(request_id).state for request_id in ids} == {"FINISHED"}


def test_request_of_a_killed_front_continues_behind_another(site: Site, tmp_path: Path) -> None:
    """Under the client's own id."""
    request: dict[str, Any] = {"prompt": "survive", "max_tokens": 150, "extra_headers": {"Idempotency-Key": "mine"}}
    with site.another_front(tmp_path / "front.log") as (process, url):
        stream = site.client(url).completions.create(stream=True, **request, **GREEDY)
        next(stream)
        process.kill()
        with pytest.raises(openai.APIConnectionError):
            streamed(stream)
    answer = site.client().completions.create(**request, **GREEDY)
    assert answer.choices[0].text == site.tokens(b"survive", 150).decode()


def test_stopping_front_finishes_its_answers(site: Site, tmp_path: Path) -> None:
    with site.another_front(tmp_path / "front.log") as (process, url):
        stream = site.client(url).completions.create(prompt="finish", max_tokens=60, stream=True, **GREEDY)
        first = next(stream).choices[0].text
        process.send_signal(signal.SIGTERM)
        assert first + streamed(stream) == site.tokens(b"finish", 60).decode()
        assert process.wait(LIMIT_S) == 0


def test_dead_front_is_restarted(own_site: Site) -> None:
    before = own_site.front_pid()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: own_site.front_pid() != before)
    eventually(own_site.answers)
    own_site.text("back again", 8)


def test_no_request_is_left_running(lone_site: Site) -> None:
    async def running(client: Client) -> list[str]:
        rows = (await client.requests()).rows
        return [row.request_id for row in rows if row.state not in ("FINISHED", "ABORTED")]

    eventually(lambda: lone_site.ask(running) == [])


def test_the_front_has_no_torch(site: Site) -> None:
    """Not even once it has tokenized."""
    site.text("tokenize this", 2)
    maps = Path(f"/proc/{site.front_pid()}/maps").read_text()
    assert "tokenizers" in maps
    assert "torch" not in maps
    code = "import sys, hisparse.http.service; print(*{'torch', 'transformers', 'safetensors'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


def test_command_without_its_packages_names_them() -> None:
    code = "import sys; sys.modules['h11'] = None; from hisparse.cli import main; main(['http'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 8
    assert "pip install 'hisparse[http]'" in done.stderr


def test_an_unknown_request_stays_unknown(site: Site) -> None:
    with pytest.raises(NotFound):
        site.row("never-submitted")
