"""Sends spans to an OTLP receiver over HTTP, by the SDK of OpenTelemetry, from a thread of its own.

The loop puts finished spans into a queue and never waits. What finds no room there is dropped and counted. The thread
encodes and sends batches; a receiver that stays away costs spans, which are counted, and nothing else. The SDK is
imported only where `cluster.traces_endpoint` is set. Its exporter reads further variables of its own, such as
OTEL_EXPORTER_OTLP_HEADERS for a receiver that asks for a token.

Rejected: the SDK's tracer and BatchSpanProcessor. Spans are made after the fact, of lines of a history, with ids that
follow from the request; a tracer would draw its own ids and keep an object for each stage under way.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from basics.tracing.spans import SpanCounters, TraceSpan
from protocol.errors import ConfigError
from protocol.logs import fields, logger
from protocol.settings import ClusterSettings
from protocol.version import our_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

#: Spans that wait for the thread: some 10 s of a coordinator that admits 1,000 traced requests a second.
QUEUE_SPANS_MAX: Final = 65_536
#: Spans of one message, some 300 bytes each.
BATCH_SPANS_MAX: Final = 512
#: How long a span waits for others.
SEND_INTERVAL_S: Final = 1.0
#: How long what waits may take to be sent when the process stops.
CLOSE_LIMIT_S: Final = 2.0
#: How long one message may take, attempts included.
SEND_LIMIT_S: Final = 10.0

log = logger("tracing")


class SpanSender:
    """`put` is called by the process's loop. Close it after the loop has ended."""

    def __init__(
        self, exporter: SpanExporter, readable: Callable[[TraceSpan], ReadableSpan], counters: SpanCounters
    ) -> None:
        self._exporter = exporter
        self._readable = readable
        self._counters = counters
        self._queue: deque[TraceSpan] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._fails = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[TraceSpan]) -> None:
        """Have these sent. Drops what finds no room."""
        room = max(0, QUEUE_SPANS_MAX - len(self._queue))
        self._queue.extend(spans[:room])
        self._counters.dropped += len(spans[room:])
        if len(self._queue) >= BATCH_SPANS_MAX:
            self._wake.set()

    @property
    def waiting(self) -> int:
        """Spans in the queue, from any thread."""
        return len(self._queue)

    def close(self) -> None:
        """Send what waits, for CLOSE_LIMIT_S at most."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_LIMIT_S)
        self._exporter.shutdown()  # ends the pauses between its attempts
        if self._thread.is_alive():
            log.warning("not all spans were sent", extra=fields(left=len(self._queue)))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            self._wake.wait(SEND_INTERVAL_S)
            self._wake.clear()
            is_last = self._closing
            while self._queue:
                self._send([self._queue.popleft() for _ in range(min(len(self._queue), BATCH_SPANS_MAX))])
            if is_last:
                return

    def _send(self, batch: list[TraceSpan]) -> None:
        try:
            arrived = self._exporter.export([*map(self._readable, batch)]).name == "SUCCESS"
        except Exception:
            log.exception("defect")
            arrived = False
        if arrived:
            self._counters.exported += len(batch)
        else:
            self._counters.failed += len(batch)
        if arrived is self._fails:
            self._fails = not arrived
            if self._fails:
                log.warning("the receiver of traces does not take spans; they are dropped")
            else:
                log.info("the receiver of traces takes spans again")


@contextmanager
def open_sender(cluster: ClusterSettings, process: str, counters: SpanCounters) -> Iterator[SpanSender | None]:
    """None where `cluster.traces_endpoint` is empty. `process` is part of the service's name. Raises ConfigError where
    the SDK is not installed."""
    if not cluster.traces_endpoint:
        yield None
        return
    sender = _make_sender(cluster, process, counters)
    log.info("tracing", extra=fields(endpoint=cluster.traces_endpoint, ratio=cluster.trace_ratio))
    try:
        yield sender
    finally:
        sender.close()


def _make_sender(cluster: ClusterSettings, process: str, counters: SpanCounters) -> SpanSender:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        from basics.tracing.readable import Readable
    except ImportError as error:
        raise ConfigError(
            "OpenTelemetry is not installed",
            field="cluster.traces_endpoint",
            value=cluster.traces_endpoint,
            remedy="pip install 'hisparse[otel]', or leave it empty",
        ) from error
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # SpanSender says what goes wrong, once
    resource = Resource.create(
        {
            "service.name": f"hisparse-{process}",
            "service.namespace": cluster.name,
            "service.version": our_version(),
            "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
        }
    )
    exporter = OTLPSpanExporter(endpoint=cluster.traces_endpoint, timeout=SEND_LIMIT_S)
    return SpanSender(exporter, Readable(resource), counters)
