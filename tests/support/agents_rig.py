"""A front on a real socket before a FakeModel, for clients of other makers, which run in threads."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anthropic
import msgspec
import openai
import trio

from hisparse.http.server.listener import HttpListener
from protocol.settings import HttpSettings
from protocol.tokenizer_files import TokenizerFile
from tests.support.fakes.fake_model import FakeModel, Script
from tests.support.http_rig import DEEPSEEK_TOKENS, FrontRig, deepseek_tokenizer_json, front_rig
from tests.support.tiny_templates import TEMPLATES
from worker.runners.tiny import EOS, VOCAB

#: Of one answer, on a machine whose cores are busy.
LIMIT_S: Final = 240.0
CONTEXT: Final = 64 * 1024
#: The published repository of DeepSeek-V3.2 has no chat template.
PUBLISHED: Final = "deepseek-v3.2, published"


@dataclass
class AgentsRig:
    front: FrontRig
    model: FakeModel
    port: int
    key: str = "no key"
    _clients: list[Any] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, key: str = "", *, strict: bool = True) -> openai.OpenAI:
        """`strict`: what it is answered is held to its types."""
        made = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=key or self.key,
            max_retries=0,
            timeout=LIMIT_S,
            _strict_response_validation=strict,
        )
        self._clients.append(made)
        return made

    def anthropic(self, key: str = "") -> anthropic.Anthropic:
        """What it is answered is held to its types."""
        made = anthropic.Anthropic(
            base_url=self.url,
            api_key=key or self.key,
            max_retries=0,
            timeout=LIMIT_S,
            _strict_response_validation=True,
        )
        self._clients.append(made)
        return made

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def agents_rig(
    directory: Path,
    script: Script,
    *,
    family: str = "glm-5",
    settings: HttpSettings | None = None,
    keys: tuple[str, ...] = (),
) -> AsyncIterator[AgentsRig]:
    """`family`: whose tiny chat template is served; PUBLISHED: none, and a tokenizer with DeepSeek-V3.2's tokens."""
    async with front_rig(directory, settings, keys) as front, trio.open_nursery() as nursery:
        scheduler = front.gateway.scheduler
        assert scheduler.served is not None
        special = DEEPSEEK_TOKENS if family == PUBLISHED else ()
        if special:
            front.gateway.tokenizers.data = deepseek_tokenizer_json()
        file = TokenizerFile("json" if special else "bytes", front.gateway.tokenizers.data)
        scheduler.served = msgspec.structs.replace(
            scheduler.served,
            chat_template=TEMPLATES.get(family, ""),
            context_max_tokens=CONTEXT,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            tokenizer_kind=file.kind,
            tokenizer_hash=file.hash,
        )
        await front.link.client.welcome()
        model = FakeModel(front.gateway, script, special=special)
        nursery.start_soon(model.run)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            stopping = trio.Event()
            listener = HttpListener(listening, front.front.serve, front.counters, None, 1_024)
            nursery.start_soon(listener.run, stopping)
            rig = AgentsRig(front, model, listening.getsockname()[1], keys[0] if keys else "no key")
            yield rig
            rig.close()
            nursery.cancel_scope.cancel()
