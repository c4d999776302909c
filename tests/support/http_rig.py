"""The HTTP front for tests: without connections, over a real gateway; and a checkpoint that can chat."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio
import trio.testing

from hisparse.client.client import open_client
from hisparse.http.front import Front
from hisparse.http.link import CoordinatorLink
from hisparse.http.models.formats.deepseek import ASSISTANT, DSML, USER
from hisparse.http.models.formats.deepseek import BOS as BEGIN
from hisparse.http.models.formats.deepseek import EOS as END
from hisparse.http.models.formats.replies import THINK, THINK_END
from hisparse.http.outputs import FollowedOutputs
from hisparse.http.server.api_keys import ApiKeys, parse_keys
from hisparse.http.server.exchange import ClientGone
from hisparse.http.server.wire import RequestHead
from metrics.http import HttpSources, scrape
from metrics.state import HttpCounters
from protocol.settings import HttpSettings
from tests.support.gateway_rig import GatewayRig, running
from tests.support.limits import HANG_LIMIT_S
from worker.runners.tiny import BOS, EOS, write_tiny_checkpoint

#: Each turn as <bos>role:text, then what the assistant is to continue.
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message.role == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "{{ bos_token }}{{ message.role }}:{{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant:{{ mood }}{% endif %}"
)
KEY: Final = "a-key-of-thirty-two-characters-0"


#: Special tokens by which a checkpoint without a chat template is known as DeepSeek-V3.2, from id 256 on.
DEEPSEEK_TOKENS: Final = (BEGIN, END, USER, ASSISTANT, THINK, THINK_END, DSML)


def deepseek_tokenizer_json() -> bytes:
    """A tokenizer.json of bytes with DeepSeek-V3.2's special tokens."""
    return byte_tokenizer_json(DEEPSEEK_TOKENS)


def byte_tokenizer_json(special: Sequence[str] = ("<bos>", "<eos>", "<pad>")) -> bytes:
    """A tokenizer.json in which id i is byte i, as the tiny checkpoint has it: any character may be cut. Ids of
    `special` tokens follow."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    library = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(special))
    assert [library.token_to_id(text) for text in special[:2]] == [BOS, EOS]
    return library.to_str().encode()


def write_chat_model(path: Path) -> Path:
    """A tiny checkpoint with a tokenizer.json and a chat template."""
    write_tiny_checkpoint(path, "glm-5", index_topk=16, context_max_tokens=2_048, layers=2)
    (path / "tokenizer.json").write_bytes(byte_tokenizer_json())
    eos = {"__type": "AddedToken", "content": "<eos>"}
    settings = {"bos_token": "<bos>", "eos_token": eos, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


class Peer:
    """A client of the front: one request, as a connection would hand it over; what is answered gathers in it."""

    def __init__(self, method: str, path: str, headers: Mapping[str, str], queue_messages: int) -> None:
        self._headers = tuple((name.lower(), value) for name, value in headers.items())
        self.head = RequestHead(method, path, self._headers)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.held = False
        self.complete = trio.Event()
        self._changed = trio.Event()
        self._messages, self._pieces = trio.open_memory_channel[bytes | None](queue_messages)
        self._body_is_whole = not self.head.has_body

    async def say(self, body: bytes, *, more: bool = False) -> None:
        """What comes after the answer is dropped."""
        if not self.complete.is_set():
            if body:
                await self._messages.send(body)
            if not more:
                await self._messages.send(b"")

    async def leave(self) -> None:
        await self._messages.send(None)

    # ------------------------------------------------------------ hisparse.http.server.exchange.Channel

    async def admit(self, owner: str) -> None:
        self.held = True

    async def piece(self) -> bytes:
        piece = await self._pieces.receive()
        if piece is None:
            raise ClientGone
        return piece

    async def left(self) -> None:
        while await self._pieces.receive() is not None:
            pass

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        await trio.testing.wait_all_tasks_blocked()  # it takes a while
        self.status, self.headers = status, dict(headers)
        self._tell()

    async def write(self, data: bytes) -> None:
        await trio.testing.wait_all_tasks_blocked()
        self.body += data
        self._tell()

    async def end(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        self.complete.set()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------ for tests

    async def until(self, text: str) -> None:
        """Wait until the body so far contains `text`."""
        with trio.fail_after(HANG_LIMIT_S):
            while text not in self.body.decode():
                await self._changed.wait()

    async def answer(self) -> Any:
        """The whole answer, decoded."""
        with trio.fail_after(HANG_LIMIT_S):
            await self.complete.wait()
        return msgspec.json.decode(self.body)

    async def events(self) -> list[Any]:
        """The events of the whole stream; the last is "[DONE]" when all went well."""
        with trio.fail_after(HANG_LIMIT_S):
            await self.complete.wait()
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class FrontRig:
    """A front over `gateway`'s sockets. A peer's task is cancelled with the rig's nursery."""

    def __init__(self, gateway: GatewayRig, nursery: trio.Nursery, settings: HttpSettings, keys: ApiKeys) -> None:
        self.gateway = gateway
        self.counters = HttpCounters()
        self.link = CoordinatorLink(lambda: open_client(gateway.client_socket.endpoint, reconnect_limit_s=0))
        self.outputs = FollowedOutputs(nursery, self.link, self.counters)
        self.stopping = False
        self.sources = HttpSources(
            "hisparse", "0.1.0", self.counters, lambda: self.link.connected, lambda: self.stopping
        )
        self.front = Front(settings, keys, self.link, self.outputs, self.counters, scrape=lambda: scrape(self.sources))
        self._nursery = nursery

    def open(self, method: str, path: str, headers: Mapping[str, str] | None = None, queue_messages: int = 10) -> Peer:
        told = dict(headers or {}) | ({"transfer-encoding": "chunked"} if method == "POST" else {})
        peer = Peer(method, path, told, queue_messages)
        self._nursery.start_soon(self.front.serve, peer.head, peer)
        return peer

    async def post(self, path: str, body: object, **headers: str) -> Peer:
        peer = self.open("POST", path, {name.replace("_", "-"): value for name, value in headers.items()})
        await peer.say(body if isinstance(body, bytes) else msgspec.json.encode(body))
        return peer

    async def complete(self, body: object, **headers: str) -> Peer:
        return await self.post("/v1/completions", body, **headers)

    async def submitted(self, count: int) -> list[str]:
        """Ids at the coordinator, once there are that many."""
        with trio.fail_after(HANG_LIMIT_S):
            while len(self.gateway.scheduler.request_indices) < count:  # noqa: ASYNC110
                await trio.sleep(0.005)
        return list(self.gateway.scheduler.request_indices)

    def speak(self, request_id: str, text: str | bytes) -> None:
        self.gateway.speak(request_id, list(text.encode() if isinstance(text, str) else text))

    def aborted(self) -> list[str]:
        aborts = [ids for command, ids, *_ in self.gateway.scheduler.commands if command == "abort"]
        return [request_id for ids in aborts if isinstance(ids, tuple) for request_id in ids]


@asynccontextmanager
async def front_rig(
    directory: Path, settings: HttpSettings | None = None, keys: tuple[str, ...] = ()
) -> AsyncIterator[FrontRig]:
    """`keys` are lines of the file of API keys."""
    async with running(GatewayRig(directory)) as gateway, trio.open_nursery() as nursery:
        api_keys = ApiKeys(parse_keys("\n".join(keys), "keys") if keys else ())
        rig = FrontRig(gateway, nursery, settings or HttpSettings(), api_keys)
        nursery.start_soon(rig.link.run)
        with trio.fail_after(HANG_LIMIT_S):
            while not rig.link.connected:  # noqa: ASYNC110
                await trio.sleep(0.005)
        yield rig
        nursery.cancel_scope.cancel()
    rig.front.close()
