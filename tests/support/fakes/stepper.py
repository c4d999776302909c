"""A fake of the actor whose task steps another one."""

from __future__ import annotations

from coordinator.actor import Actor


class FakeStepper(Actor[None]):
    """Stands for the Scheduler, whose task calls the HostPool."""

    def __init__(self) -> None:
        super().__init__("stepper", mailbox_max=1, batch_max=1)

    async def handle(self, batch: list[None]) -> None:
        raise NotImplementedError
