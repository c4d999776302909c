"""TLS of the HTTP front: certificates that are refused and why; a real front over TLS, whose files are replaced."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Final

import pytest

from hisparse.cli import main
from hisparse.http.server.tls import Tls, tls_of
from protocol.errors import ConfigError, Unavailable
from protocol.settings import HttpSettings
from tests import ROOT
from tests.support.tls_pair import write_pair

LIMIT_S: Final = 240.0
OLD_KEY: Final = "an-old-key-of-the-front"
NEW_KEY: Final = "a-new-key-of-the-front"


def test_bad_pair_is_refused_naming_the_file(tmp_path: Path) -> None:
    (cert, key), (_, other_key) = write_pair(tmp_path), write_pair(tmp_path, "other")
    Tls(cert, key)
    text, locked, passphrase = tmp_path / "text", tmp_path / "open.key", tmp_path / "locked.key"
    text.write_text("not a certificate")
    text.chmod(0o600)
    locked.write_bytes(Path(key).read_bytes())
    locked.chmod(0o604)
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", str(passphrase)], check=True
    )
    passphrase.chmod(0o600)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for files, field, reason in (
        ((str(tmp_path / "none"), key), "http.tls_cert_file", "cannot be read: No such file"),
        ((cert, str(tmp_path / "none")), "http.tls_key_file", "cannot be read: No such file"),
        ((str(text), key), "http.tls_cert_file", "holds no certificate"),
        ((key, key), "http.tls_cert_file", "holds no certificate"),
        ((cert, str(text)), "http.tls_key_file", "holds no private key"),
        ((cert, other_key), "http.tls_key_file", f"is not the key of {cert}"),
        ((cert, str(locked)), "http.tls_key_file", "others may read it"),
        ((str(tmp_path / "pipe"), key), "http.tls_cert_file", "is no regular file"),
        ((cert, str(tmp_path / "pipe")), "http.tls_key_file", "is no regular file"),
        ((cert, str(passphrase)), "http.tls_key_file", "has a passphrase"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reason)) as refusal:
            Tls(*files)
        assert (refusal.value.field, bool(refusal.value.remedy)) == (field, True)


def test_bad_files_change_nothing_on_reload(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path)
    tls, before = Tls(cert, key), certificate_of(Path(cert).read_text())
    Path(key).write_bytes(Path(write_pair(tmp_path, "other")[1]).read_bytes())
    with pytest.raises(ConfigError, match="is not the key of"):
        tls.reload()
    assert shown_by(tls) == before
    write_pair(tmp_path)
    tls.reload()
    assert shown_by(tls) == certificate_of(Path(cert).read_text()) != before


def test_without_files_the_front_speaks_plain_http() -> None:
    assert tls_of(HttpSettings()) is None
    assert [HttpSettings(tls_cert_file=cert).url for cert in ("", "c")] == [
        "http://127.0.0.1:8000",
        "https://127.0.0.1:8000",
    ]


def certificate_of(pem: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem)


def shown_by(tls: Tls) -> bytes | None:
    """What a client is shown, in memory."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = tls.context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert(binary_form=True)


def write_keys(place: Path, *keys: str) -> str:
    file = place / "api.keys"
    file.write_text("\n".join(keys))
    file.chmod(0o600)
    return str(file)


@contextmanager
def front(place: Path, cert: str, key: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A front without a coordinator, and its port: it answers 503 where it is asked for its health."""
    log = place / "http.log"
    options = ["--port", "0", "--metrics-port", "-1", "--tls-cert", cert, "--tls-key", key]
    options += ["--api-keys", write_keys(place, OLD_KEY)]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "hisparse.cli", "http", *options],
            cwd=ROOT,
            env=os.environ | {"HISPARSE_CLUSTER_RUNTIME_DIR": str(place)},
            stderr=stderr,
        )
    try:
        yield process, int(until(log, r"listening.*https://127\.0\.0\.1:(\d+)").group(1))
    finally:
        process.terminate()
        assert process.wait(LIMIT_S) == 0


def until(log: Path, pattern: str) -> re.Match[str]:
    limit = time.monotonic() + LIMIT_S
    while (found := re.search(pattern, log.read_text())) is None:
        assert time.monotonic() < limit, log.read_text()
        time.sleep(0.05)
    return found


def ask(port: int, cert: str, path: str = "/health", key: str = OLD_KEY) -> tuple[int, bytes | None]:
    """Ask as a client that trusts `cert`: the status, and the certificate that was shown."""
    connection = HTTPSConnection("localhost", port, timeout=LIMIT_S, context=ssl.create_default_context(cafile=cert))
    connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    shown = connection.sock.getpeercert(binary_form=True)
    status = connection.getresponse().status
    connection.close()
    return status, shown


@pytest.mark.process
def test_front_serves_tls_only_and_reloads_certificates(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path)
    with front(tmp_path, cert, key) as (process, port):
        assert ask(port, cert) == (503, certificate_of(Path(cert).read_text()))
        assert [ask(port, cert, "/v1/models", key)[0] for key in (OLD_KEY, NEW_KEY)] == [503, 401]
        with socket.create_connection(("localhost", port), LIMIT_S) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"HTTP/1.1 503" not in plain.recv(4096), "plain HTTP is not answered"
        Path(key).write_text("half written")
        process.send_signal(signal.SIGHUP)
        until(tmp_path / "http.log", r"not read again.*TLS files.*holds no private key")
        write_pair(tmp_path)
        process.send_signal(signal.SIGHUP)
        until(tmp_path / "http.log", r"(?m) read again .*TLS files")
        assert ask(port, cert) == (503, certificate_of(Path(cert).read_text()))
        write_keys(tmp_path, NEW_KEY)
        process.send_signal(signal.SIGHUP)
        until(tmp_path / "http.log", r"(?s)( read again .*API keys.*){3}")
        assert [ask(port, cert, "/v1/models", key)[0] for key in (OLD_KEY, NEW_KEY)] == [401, 503]


@pytest.mark.process
def test_reload_command_reaches_the_front_and_says_what_it_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = write_pair(tmp_path)
    command = ["reload", "http", "--runtime-dir", str(tmp_path)]
    with front(tmp_path, cert, key) as (process, port):
        (name,) = [path.name for path in tmp_path.glob("http-*.sock")]
        assert name == f"http-{process.pid}.sock"
        assert main.main(command, standalone_mode=False) == 0
        keys, tls = capsys.readouterr().out.splitlines()
        said = f"http {process.pid}: API keys: unchanged: the same file (inode {(tmp_path / 'api.keys').stat().st_ino})"
        assert keys == f"{said} and content as before; 1 keys"
        assert tls.startswith(f"http {process.pid}: TLS files: unchanged: the same file (inode ")
        (tmp_path / "new.keys").touch(mode=0o600)
        (tmp_path / "new.keys").write_text(f"{NEW_KEY}\n")
        (tmp_path / "new.keys").replace(tmp_path / "api.keys")
        good = Path(key).read_text()
        Path(key).write_text("half written")
        assert main.main(command, standalone_mode=False) == 1
        assert "API keys: changed; 1 keys" in (said := capsys.readouterr().out)
        assert "not read: TLS files: http.tls_key_file=" in said
        Path(key).write_text(good)
        assert [ask(port, cert, "/v1/models", it)[0] for it in (OLD_KEY, NEW_KEY)] == [401, 503]
    assert not list(tmp_path.glob("http-*.sock"))
    with pytest.raises(Unavailable, match="no HTTP front listens there"):
        main.main(command, standalone_mode=False)
