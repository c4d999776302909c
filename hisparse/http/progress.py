"""The life of a request at the coordinator, for its client: GET /v1/requests/ID.

The coordinator hears the front as one client, whose messages all keys share. So few look at once, one at a time of each
key, and each look takes a while.
"""

from __future__ import annotations

from typing import Final

import trio

from hisparse.http.apis.request_state import RequestProgress, progress_of
from hisparse.http.link import CoordinatorLink
from hisparse.http.server.api_keys import KeyOwner
from hisparse.http.server.fairness.turns import Turns
from hisparse.http.server.identities import scoped_id
from protocol.errors import NotFound
from protocol.messages import NAME_CHARS_MAX

#: Looks at once; of one key.
LOOKS_MAX: Final = 8
LOOKS_PER_KEY: Final = 1
#: How long a look keeps its turn: at most 10 in a second of one key, and 80 of all.
LOOK_S: Final = 0.1


class ProgressWatch:
    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._turns = Turns(LOOKS_MAX, LOOKS_PER_KEY)

    async def of(self, request_id: str, key: KeyOwner) -> RequestProgress:
        """Of a request whose id its client chose: other ids of an owner are not known here. Raises NotFound or
        Unavailable."""
        known = scoped_id(request_id, key.scope)
        if len(known) > NAME_CHARS_MAX:
            raise NotFound("no such request", field="path", value=request_id[:NAME_CHARS_MAX], remedy="check the id")
        async with self._turns.turn(key.name):
            try:
                row = (await self._link.client.request(known)).row
            except NotFound as error:
                raise NotFound("no such request", field="path", value=request_id, remedy="check the id") from error
            finally:
                await trio.sleep(LOOK_S)
        return progress_of(row, request_id)
