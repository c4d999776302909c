"""The served model's tokenizer, assembled from the chunks that workers send, for clients to fetch. Pure.

All workers have the same model and so the same tokenizer hash; only data with this hash is kept.
"""

from __future__ import annotations

import hashlib
from typing import Final

from protocol.errors import ProtocolError, Unavailable
from protocol.messages import TOKENIZER_CHUNK_BYTES, ModelInfo, TokenizerChunk

#: Largest tokenizer, in chunks; the largest in use are about 30 MB.
CHUNKS_MAX: Final = 128
JSON: Final = "json"


class TokenizerStore:
    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}
        self._partial: dict[str, list[bytes]] = {}

    def wants(self, model: ModelInfo) -> bool:
        """Return whether a worker that serves `model` should send its tokenizer."""
        return model.tokenizer_kind == JSON and model.tokenizer_hash not in self._data

    def take(self, worker: str, model: ModelInfo, chunk: TokenizerChunk) -> None:
        """Add the next chunk from `worker`, which serves `model`; a first chunk starts over.

        Raises ProtocolError when the chunk is of another tokenizer or out of order, or the data has another hash.
        """
        if not self.wants(model):
            return
        chunks = self._partial.pop(worker, []) if chunk.index else []
        if chunk.hash != model.tokenizer_hash or chunk.index != len(chunks):
            raise ProtocolError(f"expected chunk {len(chunks)}", field="index", value=chunk.index)
        if not chunk.index < chunk.total <= CHUNKS_MAX or len(chunk.data) > TOKENIZER_CHUNK_BYTES:
            raise ProtocolError(
                f"more than {CHUNKS_MAX} chunks, or a chunk is too large", field="total", value=chunk.total
            )
        chunks.append(chunk.data)
        if len(chunks) < chunk.total:
            self._partial[worker] = chunks
            return
        data = b"".join(chunks)
        if hashlib.sha256(data).hexdigest() != model.tokenizer_hash:
            raise ProtocolError("the data has another hash", field="hash", value=chunk.hash)
        self._data = {model.tokenizer_hash: data}
        self._partial.clear()

    def forget(self, worker: str) -> None:
        """The worker is gone: drop its chunks."""
        self._partial.pop(worker, None)

    def tokenizer(self, model: ModelInfo | None) -> tuple[str, str, bytes]:
        """Kind, hash and data. Raises Unavailable until a worker has sent it."""
        if model is None:
            raise Unavailable("no worker has registered yet", remedy="start one with: hisparse worker --model PATH")
        if self.wants(model):
            raise Unavailable("the tokenizer has not arrived yet", remedy="retry in a moment")
        return model.tokenizer_kind, model.tokenizer_hash, self._data.get(model.tokenizer_hash, b"")
