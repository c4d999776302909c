"""Drain a worker by handover: its requests go on at other workers, and no token is lost or computed twice.

    python examples/drain_worker.py ipc:///run/hisparse/admin.sock w0

Prints where each request went. The worker takes no more requests until it is undrained (--undrain does so at the end).
"""

from __future__ import annotations

import argparse

import trio

import hisparse

POLL_S = 0.1


async def drain(client: hisparse.Client, worker: str, deadline_s: float) -> list[str]:
    """Hand over every request of `worker`, wait until none is left, and return the ids of those that ran there."""
    requests = [row.request_id for row in (await client.requests()).rows if row.worker == worker]
    await client.drain([worker], handover=True, deadline_s=deadline_s)
    with trio.fail_after(deadline_s):
        while await state_of(client, worker) != "drained":  # noqa: ASYNC110  (the service has no call that waits)
            await trio.sleep(POLL_S)
    return requests


async def state_of(client: hisparse.Client, worker: str) -> str:
    return next(row.state for row in await client.workers() if row.worker == worker)


async def drain_and_report(endpoint: str, worker: str, deadline_s: float, undrain: bool) -> None:
    async with hisparse.open_client(endpoint, role="admin", name="drain_worker") as client:
        for request_id in await drain(client, worker, deadline_s):
            row = (await client.request(request_id)).row
            print(f"{request_id}: {row.state} {row.worker or '(no worker)'}, {row.generated_tokens} tokens")
        print(f"{worker}: {await state_of(client, worker)}")
        if undrain:
            await client.undrain([worker])


def main() -> None:
    parser = argparse.ArgumentParser(description="Drain a worker by handover.")
    parser.add_argument("endpoint")
    parser.add_argument("worker")
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--undrain", action="store_true", help="accept requests again at the end")
    options = parser.parse_args()
    trio.run(drain_and_report, options.endpoint, options.worker, options.deadline, options.undrain)


if __name__ == "__main__":
    main()
