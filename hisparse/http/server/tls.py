"""TLS of the front: a certificate chain and its key, in two files, read at start and again at a reload.

Both are tried out before they take the place of those in use, so that a pair that does not fit, or is half written,
changes nothing. Connections that are open keep what they began with; new ones get the new certificate.

HTTP/1.1 alone is offered, with which the front's limits are held (hisparse.http.service). Clients are told apart by
API keys, not by certificates of their own. A key with a passphrase is refused: it would have to be typed at every
start of the front.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

import trio

from hisparse.http.server.api_keys import read_secret
from protocol.errors import ConfigError
from protocol.settings import HttpSettings
from protocol.small_files import read_small_file

CERT_FIELD: Final = "http.tls_cert_file"
KEY_FIELD: Final = "http.tls_key_file"
ALPN: Final = "http/1.1"


class Tls:
    """`context` is for the listener, and stays the same."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError, naming the file that is wrong."""
        self._files = cert, key
        check_pair(cert, key)
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols([ALPN])
        self.context.load_cert_chain(cert, key)

    def reload(self) -> str:
        """The files may have been replaced; says what is in use. Raises ConfigError, having changed nothing."""
        check_pair(*self._files)
        self.context.load_cert_chain(*self._files)
        return "new connections get this certificate"


class PacedTransport(trio.abc.Stream):
    """What TLS is spoken over. While there is a `pace`, during the handshake, each read waits for it: a handshake takes
    the event loop for as long as some requests.

    The client has `limit_s` for its first byte, as long again for the rest of its side of the handshake, and as long to
    take each message. Reads and sends raise BrokenResourceError after that. The time that `pace` takes does not count,
    and what has come in time is read, however long the process had no core.
    """

    def __init__(self, stream: trio.abc.Stream, pace: Callable[[], Awaitable[None]], limit_s: float) -> None:
        self.pace: Callable[[], Awaitable[None]] | None = pace
        self._stream = stream
        self._limit_s = limit_s
        self._deadline: float | None = None  # until the first byte

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self.pace is None:
            return await self._stream.receive_some(max_bytes)
        deadline = trio.current_time() + self._limit_s if self._deadline is None else self._deadline
        try:
            with trio.fail_at(deadline):
                data = await self._stream.receive_some(max_bytes)
        except trio.TooSlowError as error:
            raise trio.BrokenResourceError("the client did not go on with its handshake") from error
        came_at = trio.current_time()
        if self._deadline is None:
            deadline = came_at + self._limit_s
        await self.pace()
        self._deadline = deadline + trio.current_time() - came_at
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.pace is None:
            return await self._stream.send_all(data)
        try:
            with trio.fail_after(self._limit_s):
                await self._stream.send_all(data)
        except trio.TooSlowError as error:
            raise trio.BrokenResourceError("the client did not take its part of the handshake") from error

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()


def tls_of(settings: HttpSettings) -> Tls | None:
    """None: plain HTTP. Raises ConfigError."""
    return Tls(settings.tls_cert_file, settings.tls_key_file) if settings.tls_cert_file else None


def check_pair(cert: str, key: str) -> None:
    """Raise ConfigError unless these are a certificate and its key, in a file closed to other users."""
    read_small_file(cert, CERT_FIELD)
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        trial.load_verify_locations(cert)
    except ssl.SSLError as error:
        raise _refused("holds no certificate in PEM form", CERT_FIELD, cert, "name the chain, leaf first") from error
    except OSError as error:
        raise _unreadable(error, CERT_FIELD, cert) from error
    read_secret(key, KEY_FIELD)

    def has_passphrase() -> NoReturn:
        raise _refused("has a passphrase", KEY_FIELD, key, "take it off: openssl pkey -in KEY -out NEW_KEY")

    try:
        trial.load_cert_chain(cert, key, password=has_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _refused(f"is not the key of {cert}", KEY_FIELD, key, "name files of one pair") from error
        raise _refused("holds no private key in PEM form", KEY_FIELD, key, "name the key of the certificate") from error


def _unreadable(error: OSError, field: str, path: str) -> ConfigError:
    return _refused(f"cannot be read: {error.strerror}", field, path, "name a file that this user may read")


def _refused(reason: str, field: str, path: str, remedy: str) -> ConfigError:
    return ConfigError(reason, field=field, value=path, remedy=remedy)
