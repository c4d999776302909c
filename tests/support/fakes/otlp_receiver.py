"""A receiver of OTLP over HTTP: keeps the spans that it is sent."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SentSpan


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came, and the name of the service that sent it."""

    service: str
    span: SentSpan

    @property
    def attributes(self) -> dict[str, object]:
        return {it.key: _value(it) for it in self.span.attributes}


def _value(pair: KeyValue) -> object:
    kind = pair.value.WhichOneof("value")
    return getattr(pair.value, kind) if kind is not None else None


class FakeOtlpReceiver:
    """Listens on loopback while it is entered."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.raw = b""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver._take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing: tests read what came."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def named(self, name: str) -> list[ReceivedSpan]:
        return [it for it in self.spans if it.span.name == name]

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = [_value(it) for it in group.resource.attributes if it.key == "service.name"]
            for scope in group.scope_spans:
                self.spans += [ReceivedSpan(str(names[0]), span) for span in scope.spans]

    def __enter__(self) -> FakeOtlpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
