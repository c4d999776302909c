"""What a client may see of its request at the coordinator: GET /v1/requests/ID. Pure."""

from __future__ import annotations

import msgspec

from hisparse.console.rows import hit_share
from protocol.messages import RequestRow


class RequestProgress(msgspec.Struct, frozen=True):
    """`state` as the coordinator has it, `reason` why, `waits_for` the kind of what it waits for, "" for nothing.
    `hit_rate` is null until rows were looked up in a hot buffer that does not hold all. `worker` is empty while it has
    none."""

    id: str
    state: str
    reason: str
    waits_for: str
    worker: str
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    hit_rate: float | None
    retractions: int
    age_s: float


def progress_of(row: RequestRow, request_id: str) -> RequestProgress:
    """`request_id` is what its client calls it."""
    return RequestProgress(
        id=request_id,
        state=row.state,
        reason=row.reason,
        waits_for=row.waits_for,
        worker=row.worker,
        prompt_tokens=row.prompt_tokens,
        generated_tokens=row.generated_tokens,
        max_tokens=row.max_tokens,
        hit_rate=hit_share(row),
        retractions=row.retractions,
        age_s=row.age_s,
    )
