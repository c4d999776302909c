"""The front's control socket: where it is, who may ask, and that a front without one serves all the same."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
import trio

from hisparse.http.server.control import Reloaded, control_socket, reload_fronts, serve_control
from protocol.errors import ConfigError, Unavailable

LIMIT_S = 240.0
#: Above the largest process id of Linux.
NO_PROCESS = 2**22 + 1


async def test_each_front_of_the_directory_is_asked(tmp_path: Path) -> None:
    asked = 0

    def reload() -> Reloaded:
        nonlocal asked
        asked += 1
        return Reloaded(("API keys: changed; 1 keys",), ("TLS files: no",))

    with control_socket(str(tmp_path)) as listener, trio.fail_after(LIMIT_S):
        assert listener is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_control, listener, reload)
            own = tmp_path / f"http-{os.getpid()}.sock"
            (tmp_path / "http-1.sock").symlink_to(own)  # as of a second front
            for _ in range(2):
                answers = await trio.to_thread.run_sync(reload_fronts, str(tmp_path))
            nursery.cancel_scope.cancel()
    assert answers == {name: reload() for name in ("http 1", f"http {os.getpid()}")}
    assert asked == 4 + 2


async def test_other_words_are_not_answered(tmp_path: Path) -> None:
    with control_socket(str(tmp_path)) as listener, trio.fail_after(LIMIT_S):
        assert listener is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_control, listener, lambda: Reloaded(("read",)))
            own = tmp_path / f"http-{os.getpid()}.sock"
            async with await trio.open_unix_socket(own) as stream:
                await stream.send_all(b"restart")
                assert await stream.receive_some(100) == b""
            async with await trio.open_unix_socket(own) as stream:
                await stream.send_all(b"reload\n")
                assert b"read" in await stream.receive_some(100)
            nursery.cancel_scope.cancel()


def test_sockets_of_fronts_that_are_gone_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / f"http-{NO_PROCESS}.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    with pytest.raises(Unavailable, match="no HTTP front listens there"):
        reload_fronts(str(tmp_path))
    with control_socket(str(tmp_path)):
        assert [path.name for path in tmp_path.iterdir()] == [f"http-{os.getpid()}.sock"]
    assert list(tmp_path.iterdir()) == []


def test_front_serves_without_a_control_socket(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)  # another user could listen there
    monkeypatch.setattr(logging.getLogger("hisparse"), "propagate", True)
    with caplog.at_level(logging.WARNING), control_socket(str(tmp_path)) as listener:
        assert listener is None
    assert "no control socket" in caplog.text
    with pytest.raises(ConfigError, match="others could reach the sockets in it"):
        reload_fronts(str(tmp_path))


@pytest.mark.refuses("the HTTP front did not answer within {} s")
def test_front_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hisparse.http.server.control.QUESTION_LIMIT_S", 0.2)
    with control_socket(str(tmp_path)) as listener:
        assert listener is not None
        with pytest.raises(Unavailable, match=r"control socket=.*the HTTP front did not answer within 0\.2 s"):
            reload_fronts(str(tmp_path))
