"""FakeGateway: the coordinator's client and admin sockets over real ipc, with scripted answers.

It runs in a thread with plain blocking ZMQ, so that it shares no code with what is tested but the message structs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import zmq

from protocol import messages

Answer = Callable[[messages.AdminMessage], Sequence[messages.GatewayMessage]]


class FakeGateway:
    """Answers each message by its type with what the test scripted; `received` holds what came, hellos apart."""

    def __init__(self, runtime_dir: Path, model: messages.ModelInfo | None = None) -> None:
        self.client_endpoint = f"ipc://{runtime_dir}/client.sock"
        self.admin_endpoint = f"ipc://{runtime_dir}/admin.sock"
        self.model = model
        self.received: list[messages.AdminMessage] = []
        self.roles: list[str] = []
        self._answers: dict[type, Answer] = {}
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def on(self, kind: type, answer: Answer) -> None:
        """Answer messages of `kind` with what `answer` returns for them, in order."""
        self._answers[kind] = answer

    def refuse(self, kind: type, code: str, message: str, **fields: str) -> None:
        self.on(kind, lambda m: [messages.Failure(tag_of(m), code, message, **fields)])

    def __enter__(self) -> FakeGateway:
        self._thread.start()
        assert self._bound.wait(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        with zmq.Context() as context:
            sockets = [context.socket(zmq.ROUTER) for _ in range(2)]
            poller = zmq.Poller()
            for socket, endpoint in zip(sockets, (self.client_endpoint, self.admin_endpoint), strict=True):
                socket.linger = 0
                socket.bind(endpoint)
                poller.register(socket, zmq.POLLIN)
            self._bound.set()
            while not self._stop.is_set():
                for socket, _ in poller.poll(20):
                    self._serve(socket)
            for socket in sockets:
                socket.close()

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        peer, frame = socket.recv_multipart()
        for reply in self._replies(messages.decode_admin(frame)):
            socket.send_multipart([peer, messages.encode(reply)])

    def _replies(self, message: messages.AdminMessage) -> Sequence[messages.GatewayMessage]:
        if isinstance(message, messages.Hello):
            self.roles.append(message.role)
            return [messages.Welcome(messages.PROTOCOL_VERSION, 1, "test", self.model)]
        self.received.append(message)
        return self._answers[type(message)](message)


def tag_of(message: messages.AdminMessage) -> int:
    assert not isinstance(message, messages.Hello)
    return message.tag
