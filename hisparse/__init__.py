"""What programs import: the client of a HiSparse cluster, its types and its errors. docs/api.md describes all of it.

    import hisparse

    async def complete(client: hisparse.Client) -> list[int]:
        stream = await client.submit([72, 105], hisparse.Sampling(max_tokens=100))
        return (await stream.collect()).tolist()

    print(hisparse.run_client("ipc:///run/hisparse/client.sock", complete))

`hisparse.kernels` has the swap-in runtime for model code of one's own. All other modules and packages of this
distribution are internal: they change without notice.

A name is imported when it is first used (PEP 562). Importing this package raises ImportError when the `kernels`,
`protocol`, ... of another distribution hides one of ours (hisparse.clashes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hisparse import clashes as _clashes

if not _clashes.is_command():
    _clashes.check_packages()

__all__ = [
    "AuditRows",
    "AuditedRow",
    "BadInput",
    "CapacityError",
    "Client",
    "ConfigError",
    "ConnectionLost",
    "Detokenizer",
    "DifferenceRow",
    "Ended",
    "HiSparseError",
    "HistoryLine",
    "Insecure",
    "InternalError",
    "ModelInfo",
    "NotAllowed",
    "NotFound",
    "PeerKey",
    "PoolRow",
    "PrefixRow",
    "PrefixRows",
    "ProtocolError",
    "RequestDetail",
    "RequestRow",
    "RequestRows",
    "Sampling",
    "TokenLogprobs",
    "TokenStream",
    "Tokenizer",
    "TokenizerData",
    "Unavailable",
    "Welcome",
    "WorkerCapacity",
    "WorkerRow",
    "WrongState",
    "__version__",
    "fetch_tokenizer",
    "open_client",
    "read_peer_key",
    "run_client",
]

if TYPE_CHECKING:
    from hisparse.client.client import Client, open_client, run_client
    from hisparse.client.connection import ConnectionLost
    from hisparse.client.token_stream import TokenStream
    from hisparse.client.tokenizer_cache import fetch_tokenizer
    from protocol.errors import (
        BadInput,
        CapacityError,
        ConfigError,
        HiSparseError,
        InternalError,
        NotAllowed,
        NotFound,
        ProtocolError,
        Unavailable,
        WrongState,
    )
    from protocol.logprobs import TokenLogprobs
    from protocol.messages import (
        AuditedRow,
        AuditRows,
        DifferenceRow,
        Ended,
        HistoryLine,
        ModelInfo,
        PoolRow,
        PrefixRow,
        PrefixRows,
        RequestDetail,
        RequestRow,
        RequestRows,
        Sampling,
        TokenizerData,
        Welcome,
        WorkerCapacity,
        WorkerRow,
    )
    from protocol.text import Detokenizer, Tokenizer
    from protocol.transport.keys import Insecure, PeerKey, read_peer_key

    __version__: str
else:
    from hisparse.lazy import attributes as _attributes

    #: Names by the module that defines them.
    _HOMES: Final = {
        "hisparse.client.client": "Client open_client run_client",
        "hisparse.client.connection": "ConnectionLost",
        "hisparse.client.token_stream": "TokenStream",
        "hisparse.client.tokenizer_cache": "fetch_tokenizer",
        "protocol.errors": "BadInput CapacityError ConfigError HiSparseError InternalError NotAllowed NotFound "
        "ProtocolError Unavailable WrongState",
        "protocol.logprobs": "TokenLogprobs",
        "protocol.messages": "AuditRows AuditedRow DifferenceRow Ended ModelInfo PoolRow PrefixRow PrefixRows "
        "RequestDetail RequestRow RequestRows Sampling HistoryLine TokenizerData Welcome WorkerCapacity WorkerRow",
        "protocol.text": "Detokenizer Tokenizer",
        "protocol.transport.keys": "Insecure PeerKey read_peer_key",
    }
    _get, __dir__ = _attributes(__name__, _HOMES)

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from protocol.version import our_version  # reads the distribution's metadata: 20 ms

            return our_version()
        return _get(name)
