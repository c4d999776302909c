"""Commands of clients and operators: checked for all requests named, then carried out for all. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from basics.request_states import TERMINAL, State, state_text
from coordinator.memory.ledger import Ledger
from coordinator.state.events import CommandAsk, RequestCommand
from coordinator.state.request_state import RequestState, describe_size
from coordinator.turn.dispatch import Dispatch, Effects
from coordinator.turn.request_table import RequestTable
from protocol.errors import BadInput, CapacityError, NotFound, WrongState
from protocol.messages import NAME_CHARS_MAX, NO_HOT_BUFFER, WorkerCapacity
from protocol.sizing import RESIDENT, Length, can_force

#: Requests named in one command.
IDS_MAX: Final = 20_000


def carry_out(
    ask: CommandAsk,
    requests: RequestTable,
    dispatch: Dispatch,
    capacities: Callable[[], Sequence[tuple[str, WorkerCapacity]]],
) -> tuple[list[Effects], tuple[str, ...]]:
    """Return what follows, and one line per request. Raises NotFound, WrongState, BadInput, CapacityError: nothing
    done."""
    lives = find(ask, requests)
    if ask.command is RequestCommand.RESIZE:
        for live in lives:
            check_size(ask.hot_slots, live.facts.request_id, live.length, capacities())
    effects = [_apply(ask, live, dispatch) for live in lives]
    return effects, tuple(f"{live.facts.request_id}: {_promise(ask, live)}" for live in lives)


def release_quarantine(
    workers: Sequence[str], ledgers: Mapping[str, Ledger], dispatch: Dispatch, *, died: bool = False
) -> tuple[list[Effects], tuple[str, ...]]:
    """Return what follows from an operator's word that these workers' lost epochs are gone, and one line per worker.

    An operator's word is no evidence against requests. A supervisor's is, which saw the process of the last epoch end:
    `died`. Raises NotFound, with nothing done.
    """
    names = tuple(dict.fromkeys(workers))
    epochs = {name: sorted({epoch for it in ledgers.values() for epoch in it.unproved(name)}) for name in names}
    for name in names:
        if not epochs[name]:
            raise NotFound(
                "has nothing in quarantine", field="worker", value=name[:NAME_CHARS_MAX], remedy="see: hisparse pool"
            )
    effects = [
        dispatch.worker_exited(name, epoch, died=died and epoch == epochs[name][-1])
        for name in names
        for epoch in epochs[name]
    ]
    return effects, tuple(f"{name}: released what its lost epochs {epochs[name]} had" for name in names)


def find(ask: CommandAsk, requests: RequestTable) -> list[RequestState]:
    """The live requests named, each once, all of which may be asked for `ask.command` now. Raises NotFound or
    WrongState of the first that may not, BadInput for none or too many."""
    if not 0 < len(ask.request_ids) <= IDS_MAX:
        count = len(ask.request_ids)
        raise BadInput(f"name 1 to {IDS_MAX} requests", field="request_ids", value=count, remedy="split the call")
    lives: list[RequestState] = []
    for request_id in dict.fromkeys(ask.request_ids):
        found = requests.find(request_id, ask.user)
        check_command(found, ask.command)
        lives.append(found)
    return lives


def check_command(request: RequestState, command: RequestCommand) -> None:
    """Raise WrongState, naming id, state and remedy, when an operator may not ask for `command` now."""
    remedy = _refusal(request, command)
    if remedy is not None:
        raise WrongState(
            f"cannot {command.value} a request that is {state_text(request.state, request.held)}",
            field="request_id",
            value=request.facts.request_id,
            remedy=remedy,
        )


def _refusal(request: RequestState, command: RequestCommand) -> str | None:
    """Return what to do instead, or None when the command may be asked for."""
    state = request.state
    if state in TERMINAL:
        return "it has ended: read its output, or submit it again"
    if state is State.RELEASING:
        return "its end is decided and it is giving its memory back: wait"
    if command is RequestCommand.RETRACT and request.held:
        return "it is held already: resume it, or abort it"
    if command is RequestCommand.RESUME and not request.held:
        return "only a held request can be resumed: this one goes on by itself"
    return None


def _apply(ask: CommandAsk, live: RequestState, dispatch: Dispatch) -> Effects:
    reason = f"{ask.command.value} by {ask.owner}"
    match ask.command:
        case RequestCommand.ABORT:
            return dispatch.end(live, "ABORTED", reason)
        case RequestCommand.RETRACT:
            return dispatch.retract(live, keep=ask.keep, hold=ask.hold, reason=reason)
        case RequestCommand.RESUME:
            return dispatch.resume(live, reason)
        case RequestCommand.RESIZE:
            return dispatch.force(live, ask.hot_slots)


def _promise(ask: CommandAsk, live: RequestState) -> str:
    match ask.command:
        case RequestCommand.ABORT:
            return "aborted once its memory is released" if live.is_placed else "aborted"
        case RequestCommand.RETRACT:
            return f"retracted, rows {'kept' if ask.keep else 'dropped'}{', held until resumed' if ask.hold else ''}"
        case RequestCommand.RESUME:
            return _resumed(live)
        case RequestCommand.RESIZE if ask.hot_slots == NO_HOT_BUFFER:
            return "hot buffer sized by policy"
        case RequestCommand.RESIZE:
            return f"{describe_size(ask.hot_slots)} as soon as chunks are free"


def _resumed(live: RequestState) -> str:
    """Say what becomes of a request that is held no longer; its rows are known once it has left its worker."""
    if live.is_placed:
        return "held no longer, runs again once it has left its worker and memory is free"
    if rows := live.kept_tokens:
        return f"held no longer, its {rows} rows were kept, runs as soon as memory is free"
    return "held no longer, its prompt is prefilled again as soon as memory is free"


def check_size(
    hot_slots: int, request_id: str, length: Length, capacities: Sequence[tuple[str, WorkerCapacity]]
) -> None:
    """Raise BadInput for a size that no worker offers, CapacityError for one that no worker could give this request."""
    capacities = [(worker, capacity) for worker, capacity in capacities if capacity.decodes]
    classes = sorted({slots for _, capacity in capacities for slots in capacity.hot_size_classes})
    if hot_slots not in (NO_HOT_BUFFER, RESIDENT, *classes):
        raise BadInput(
            "no such hot size",
            field="hot_slots",
            value=hot_slots,
            remedy=f"choose resident, auto, or a size of the workers: {', '.join(map(str, classes))}",
        )
    if hot_slots == NO_HOT_BUFFER or any(can_force(hot_slots, length, it) for _, it in capacities):
        return
    chunks = max((capacity.hot_chunks for _, capacity in capacities), default=0)
    raise CapacityError(
        f"{request_id} may not fit {chunks} hot chunks with that size at its longest",
        field="hot_slots",
        value=hot_slots,
        remedy="choose a smaller size",
    )


def is_set_aside(live: RequestState) -> bool:
    """Held, and on no worker: a stop does not wait for it."""
    return live.held and not live.is_placed


def drain_promise(requests: int, deadline_s: float | None, *, handover: bool) -> str:
    """Say what becomes of the requests on a worker that drains for `deadline_s`, or (None) drains no longer."""
    if deadline_s is None:
        return "takes requests again"
    if not requests:
        return "draining, and no request is on it"
    if deadline_s == 0:
        return f"draining, {_counted(requests)} retracted at once"
    how = "handed over or left to finish here" if handover else "left to finish here"
    return f"draining, {_counted(requests)} {how}, retracted after {deadline_s:g} s"


def stop_promise(lives: Collection[RequestState], left_s: float, *, is_kept: bool) -> str:
    """Say how long requests may run on, how many there are, and what becomes of those that have not ended by then."""
    held = sum(map(is_set_aside, lives))
    running = len(lives) - held
    if not lives:
        return "stopping, and no request is left"
    of_them = f" ({held} held)" if held else ""
    if left_s <= 0 or not running:
        fate = f"resume{'s' * (len(lives) == 1)} at the next start" if is_kept else _fails(len(lives))
        return f"stopping at once, {_counted(len(lives), 'unfinished ')}{of_them} {fate}"
    fate = "resumes at the next start" if is_kept else _fails(1)
    return f"stopping, at most {left_s:g} s for {_counted(len(lives))}{of_them} to finish; what has not then {fate}"


def _fails(requests: int) -> str:
    return f"fail{'s' * (requests == 1)}: there is no journal"


def _counted(requests: int, kind: str = "") -> str:
    return f"{requests} {kind}request{'' if requests == 1 else 's'}"
