"""Weights in the memory of a keeper: attached, or loaded into it.

    found = find_memory(socket, identity, device)
    ...                     the model takes its tensors from it, and reads those that it has to
    found.finish()          what was loaded is sealed, and whole for the next worker

Whatever goes wrong costs time alone. Without a keeper, with one that ends or refuses, tensors lie in memory of this
process, and one line says so. A keeper that has other weights is asked to let them go, also where `TableDiffersError`
tells that a model takes other tensors than are kept, and is to be loaded again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch
from torch import Tensor

from protocol.errors import HiSparseError, ProtocolError, Unavailable
from protocol.logs import fields, logger
from worker.keeper.credentials import require_own_user
from worker.keeper.mapping import Mapping, make_mapping
from worker.keeper.messages import (
    ALIGNMENT_BYTES,
    CPU,
    MESSAGE_BYTES_MAX,
    AskWeights,
    FillWeights,
    FromKeeper,
    FromWorker,
    GrowWeights,
    KeeperRefuses,
    KeptTensor,
    KeptTensors,
    SealWeights,
    SegmentGiven,
    WeightsDiffer,
    WeightsHeld,
    WeightsIdentity,
    WeightsSealed,
    decode_keeper,
    encode,
    in_messages,
)
from worker.keeper.segments import gpu_id

#: For how long a keeper may not answer: it may initialize CUDA meanwhile.
ANSWER_LIMIT_S: Final = 30.0
#: Remedies of errors that end in a plain load.
SAME_RELEASE: Final = "start `hisparse up` again, so that keeper and worker are of one release"
NEXT_START: Final = "the worker's next start gets another keeper"

log = logger("worker.keeper")

_Message = TypeVar("_Message")


class TableDiffersError(HiSparseError):
    """The tensors that are kept are not those that the model takes."""

    code = "config"


class KeeperLink:
    """A connection to the keeper that listens at `path`. Raises OSError, ProtocolError for one of another user."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(ANSWER_LIMIT_S)
            self._socket.connect(str(path))
            require_own_user(self._socket)
        except BaseException:
            self._socket.close()
            raise

    def send(self, message: FromWorker) -> None:
        """Raises OSError."""
        self._socket.sendall(encode(message))

    def receive(self, kind: type[_Message]) -> _Message:
        """The next message, which must be of `kind`. Raises OSError, ProtocolError, Unavailable."""
        message, descriptors = self._receive()
        _close_all(descriptors)
        if not isinstance(message, kind):
            raise ProtocolError("unexpected answer", field="keeper", value=type(message).__name__, remedy=SAME_RELEASE)
        return message

    def receive_segment(self) -> int:
        """The descriptor of a segment, which the caller closes. Raises as `receive`."""
        message, descriptors = self._receive()
        if not isinstance(message, SegmentGiven) or len(descriptors) != 1:
            _close_all(descriptors)
            raise ProtocolError("no segment", field="keeper", value=type(message).__name__, remedy=SAME_RELEASE)
        return descriptors[0]

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> tuple[FromKeeper, list[int]]:
        data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            return _read(data), descriptors
        except HiSparseError:
            _close_all(descriptors)
            raise


class KeptMemory:
    """Memory of a keeper, as worker.weights.memory.WeightMemory. Made by `find_memory`. `is_kept`: the next worker
    finds it filled."""

    def __init__(
        self, link: KeeperLink, identity: WeightsIdentity, device: torch.device, *, only_attach: bool = False
    ) -> None:
        self._link, self._identity, self._device = link, identity, device
        self._only_attach = only_attach
        self._began = time.monotonic()
        self._mapping: Mapping = make_mapping(device)
        self._rows: dict[str, KeptTensor] = {}
        self._used_bytes = self._tensors = 0
        self._is_lost = False
        self.is_filled = self.is_kept = False

    @property
    def source(self) -> str:
        """ "keeper" where tensors are as an earlier worker has left them, else "checkpoint"."""
        return "keeper" if self.is_filled else "checkpoint"

    def ask(self, *, replaces: bool = False) -> KeptMemory:
        """This memory, attached or to be filled. Raises OSError, HiSparseError; then nothing is mapped."""
        try:
            self._link.send(AskWeights(self._identity, replaces))
            answer = self._link.receive(WeightsHeld | WeightsDiffer | FillWeights)  # type: ignore[arg-type]
            if self._only_attach and not isinstance(answer, WeightsHeld):
                raise _not_held(answer)
            is_whole = not isinstance(answer, WeightsHeld) or self._attach(answer)
        except (OSError, HiSparseError):
            self._mapping.close()
            raise
        if isinstance(answer, WeightsDiffer):
            log.warning("other weights are kept: they are replaced", extra=fields(differ=", ".join(answer.fields)))
            return self.ask(replaces=True)
        if not is_whole and self._only_attach:
            self._mapping.close()
            raise _not_held("other bytes")
        return self if is_whole else self._replaced()

    def _replaced(self) -> KeptMemory:
        """Memory to be filled in place of this one, of which no tensor is used any more. Raises as `ask`."""
        self._mapping.close()
        return KeptMemory(self._link, self._identity, self._device).ask(replaces=True)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See WeightMemory. Raises TableDiffersError where another tensor is kept, or none."""
        if self.is_filled:
            return self._take(name, shape, dtype)
        size = prod(shape) * dtype.itemsize
        begin = -(-self._used_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if name in self._rows:
            raise ProtocolError(
                "two tensors of one name", field="weights", value=name, remedy="turn worker.keeper off, and report it"
            )
        if not self._has_room(begin + size):
            return torch.empty(shape, dtype=dtype, device=self._device)
        self._rows[name] = KeptTensor(name, _name(dtype), shape, begin)
        self._used_bytes = begin + size
        return self._at(begin, shape, dtype)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """See WeightMemory."""
        row = self._rows.get(name)
        return None if row is None else getattr(torch, row.dtype, None)

    def finish(self, checkpoint: Callable[[], str]) -> None:
        """Seal what was loaded, if `checkpoint` says that the digest of its files is what it was. Raises
        TableDiffersError where more tensors are kept than were taken."""
        if self.is_filled:
            if self._rows:
                raise self._differs(next(iter(self._rows)), "is kept, and the model has none")
            self._link.close()
            self.is_kept = True
            log.info("weights attached", extra=fields(bytes=self._used_bytes, **self._about()))
        elif not self._is_lost:
            try:
                if (digest := checkpoint()) != self._identity.checkpoint:
                    raise Unavailable(
                        "its files have changed meanwhile",
                        field="checkpoint",
                        value=digest,
                        remedy="start the worker again once they are written",
                    )
                self._seal()
                self.is_kept = True
                log.info("weights kept for later workers", extra=fields(bytes=self._used_bytes, **self._about()))
            except (OSError, HiSparseError) as error:
                self._lose(error)

    def _about(self) -> dict[str, object]:
        return {
            "tensors": self._tensors,
            "read_only": self._mapping.is_read_only,
            "seconds": round(time.monotonic() - self._began, 3),
        }

    def _attach(self, held: WeightsHeld) -> bool:
        """Map all that is held; False where bytes have changed since they were sealed."""
        while len(self._rows) < held.tensors:
            rows = self._link.receive(KeptTensors).rows
            self._rows |= {row.name: row for row in rows}
        for _ in range(held.segments):
            self._mapping.add(self._link.receive_segment(), writable=False)
        self._tensors = len(self._rows)
        self._mapping.protect()
        mapped = time.monotonic()
        if not self._mapping.is_read_only and self._mapping.digest() != held.digest:
            log.warning("kept weights have changed: they are loaded anew", extra=fields(segments=held.segments))
            return False
        checked_s = round(time.monotonic() - mapped, 4)
        log.info("weights mapped", extra=fields(seconds=round(mapped - self._began, 4), check_seconds=checked_s))
        self.is_filled = True
        return True

    def _seal(self) -> None:
        digest, self._tensors = self._mapping.digest(), len(self._rows)
        self._mapping.protect()
        for message in in_messages([*self._rows.values()]):
            self._link.send(message)
        self._link.send(SealWeights(digest))
        self._link.receive(WeightsSealed)
        self._link.close()

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        row = self._rows.pop(name, None)
        if row is None:
            raise self._differs(name, "is not kept")
        if (row.dtype, row.shape) != (_name(dtype), tuple(shape)):
            raise self._differs(name, f"is kept as {row.dtype}{[*row.shape]}")
        end = row.offset + prod(shape) * dtype.itemsize
        if row.offset % ALIGNMENT_BYTES or end > self._mapping.bytes:
            raise self._differs(name, "lies beyond the memory that is kept")
        self._used_bytes = max(self._used_bytes, end)
        return self._at(row.offset, shape, dtype)

    def _at(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = prod(shape) * dtype.itemsize
        return self._mapping.whole[begin : begin + size].view(dtype).view(shape)

    def _has_room(self, end: int) -> bool:
        """Return whether there is memory up to byte `end`, of which the keeper may have to give more."""
        try:
            while not self._is_lost and self._mapping.bytes < end:
                self._link.send(GrowWeights())
                self._mapping.add(self._link.receive_segment(), writable=True)
        except (OSError, HiSparseError) as error:
            self._lose(error)
        return not self._is_lost

    def _differs(self, name: str, what: str) -> TableDiffersError:
        """The error of a tensor; the keeper has let all of them go, unless this process only attaches."""
        with suppress(OSError):
            if not self._only_attach:
                self._link.send(AskWeights(self._identity, replaces=True))
        self._link.close()
        return TableDiffersError(
            f"the tensor {what}", field="weights", value=name, remedy="load them anew: the model's code has changed"
        )

    def _lose(self, error: Exception) -> None:
        """Go on without the keeper: what is mapped stays, and the next worker loads anew."""
        self._is_lost = True
        self._link.close()
        log.warning("weights are not kept for later workers", extra=fields(cause=error))


def find_memory(
    path: Path | None, identity: WeightsIdentity, device: torch.device, *, only_attach: bool = False
) -> KeptMemory | None:
    """Memory of the keeper that listens at `path` for weights of `identity`, whose device is that of `device`; None,
    and a line that says why, where there is none. `only_attach`: None also where it does not hold them yet."""
    if path is None:
        return None
    try:
        place = CPU if device.type == CPU else gpu_id(device.index)
        link = KeeperLink(path)
    except (OSError, HiSparseError) as error:
        log.info("no keeper of weights", extra=fields(path=path, cause=error))
        return None
    try:
        identity = msgspec.structs.replace(identity, device=place)
        return KeptMemory(link, identity, device, only_attach=only_attach).ask()
    except (OSError, HiSparseError) as error:
        link.close()
        log.warning("no keeper of weights", extra=fields(path=path, cause=error))
        return None


def _not_held(found: object) -> Unavailable:
    return Unavailable("holds no such weights", field="keeper", value=found, remedy="they are loaded by their worker")


def _read(data: bytes) -> FromKeeper:
    """Decode a message. Raises ProtocolError, and Unavailable where the keeper refuses or has gone."""
    if not data:
        raise Unavailable("the keeper has gone", field="keeper", value=os.getpid(), remedy=NEXT_START)
    try:
        message: FromKeeper = decode_keeper(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        size = f"{len(data)} bytes"
        raise ProtocolError(f"not readable: {error}", field="keeper", value=size, remedy=SAME_RELEASE) from error
    if isinstance(message, KeeperRefuses):
        raise Unavailable(message.reason, field="keeper", value=os.getpid(), remedy="see the keeper's log")
    return message


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
