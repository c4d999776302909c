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

from typing import TYPE_CHECKING

from hisparse import clashes as _clashes

if not _clashes.is_command():
    _clashes.check_packages()

if TYPE_CHECKING:
    # What the package exports. At run time hisparse.lazy reads these lines.
    from hisparse.client.client import Client as Client
    from hisparse.client.client import open_client as open_client
    from hisparse.client.client import run_client as run_client
    from hisparse.client.connection import ConnectionLost as ConnectionLost
    from hisparse.client.token_stream import TokenStream as TokenStream
    from hisparse.client.tokenizer_cache import fetch_tokenizer as fetch_tokenizer
    from protocol.errors import BadInput as BadInput
    from protocol.errors import CapacityError as CapacityError
    from protocol.errors import ConfigError as ConfigError
    from protocol.errors import HiSparseError as HiSparseError
    from protocol.errors import InternalError as InternalError
    from protocol.errors import NotAllowed as NotAllowed
    from protocol.errors import NotFound as NotFound
    from protocol.errors import ProtocolError as ProtocolError
    from protocol.errors import Unavailable as Unavailable
    from protocol.errors import WrongState as WrongState
    from protocol.logprobs import TokenLogprobs as TokenLogprobs
    from protocol.messages import AuditedRow as AuditedRow
    from protocol.messages import AuditRows as AuditRows
    from protocol.messages import DifferenceRow as DifferenceRow
    from protocol.messages import Ended as Ended
    from protocol.messages import HistoryLine as HistoryLine
    from protocol.messages import ModelInfo as ModelInfo
    from protocol.messages import PoolRow as PoolRow
    from protocol.messages import PrefixRow as PrefixRow
    from protocol.messages import PrefixRows as PrefixRows
    from protocol.messages import RequestDetail as RequestDetail
    from protocol.messages import RequestRow as RequestRow
    from protocol.messages import RequestRows as RequestRows
    from protocol.messages import Sampling as Sampling
    from protocol.messages import TokenizerData as TokenizerData
    from protocol.messages import Welcome as Welcome
    from protocol.messages import WorkerCapacity as WorkerCapacity
    from protocol.messages import WorkerRow as WorkerRow
    from protocol.text import Detokenizer as Detokenizer
    from protocol.text import Tokenizer as Tokenizer
    from protocol.transport.keys import Insecure as Insecure
    from protocol.transport.keys import PeerKey as PeerKey
    from protocol.transport.keys import read_peer_key as read_peer_key

    __version__: str
else:
    from hisparse.lazy import attributes as _attributes

    _get, __dir__ = _attributes(__name__, "__version__")

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from protocol.version import our_version  # reads the distribution's metadata: 20 ms

            return our_version()
        return _get(name)
