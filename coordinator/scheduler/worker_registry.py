"""Register of workers and nodes, and checks of one that would join. Pure.

Workers of a coordinator serve one model (a request may run on any of them), and those of a node share one host pool.
Both are pinned by the first to come, for as long as anything depends on them. A pool that was created anew (its id
says so) is another pool: what was kept in the one before is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from basics.request_checks import check_name
from coordinator.journal.records import PoolOpened, WorkerJoined
from coordinator.memory.ledger import Ledger
from coordinator.state.events import WorkerPort
from coordinator.state.placement_table import PlacementTable
from coordinator.state.worker_entry import WorkerEntry, check_member, ranks_of
from protocol.errors import BadInput, ConfigError, NotFound, ProtocolError, Unavailable, WrongState
from protocol.messages import (
    NAME_CHARS_MAX,
    NOT_SEEN,
    ROLES,
    GroupMember,
    ModelInfo,
    PoolRow,
    WorkerCapacity,
    WorkerHello,
    WorkerRow,
)
from protocol.units import CONTEXT_MAX_TOKENS

#: Workers that are gone are listed until there are this many.
GONE_MAX: Final = 64
#: Groups whose latest incarnation is remembered.
GROUPS_MAX: Final = 4_096
#: Names whose last epoch is remembered.
EPOCHS_MAX: Final = 4_096
#: Most pages of one pool: the ledger allocates 8 bytes for each.
HOST_PAGES_MAX: Final = 1 << 24
#: Most of any GPU count.
GPU_COUNT_MAX: Final = 1 << 30


class _GoneWorker(NamedTuple):
    """A disconnected worker: its row as of the time when it left."""

    row: WorkerRow
    left_at: float

    def row_at(self, now: float) -> WorkerRow:
        age_s = self.row.link_age_s
        return msgspec.structs.replace(self.row, link_age_s=age_s if age_s == NOT_SEEN else age_s + now - self.left_at)


class WorkerRegistry:
    """`open_pool(hello)` starts the HostPool of a worker's node with an empty ledger; `ledgers` has them by node."""

    def __init__(
        self, placement_table: PlacementTable, ledgers: Mapping[str, Ledger], open_pool: Callable[[WorkerHello], None]
    ) -> None:
        self._placement_table = placement_table
        self._ledgers = ledgers
        self._open_pool = open_pool
        self._pools: dict[str, WorkerCapacity] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._incarnations: OrderedDict[str, int] = OrderedDict()  # latest of each group
        self._gone: OrderedDict[str, _GoneWorker] = OrderedDict()
        self._standbys: OrderedDict[str, str] = OrderedDict()
        self._capacities: list[tuple[str, WorkerCapacity]] = []
        self._capacities_since = -1
        self.model: ModelInfo | None = None

    # ---------------------------------------------------------------- joining and leaving

    def join(self, hello: WorkerHello, port: WorkerPort, *, is_changing: bool = False) -> WorkerEntry:
        """The worker that may join now; its node has a pool. Raises what `Scheduler.worker_up` says, then unchanged.

        `is_changing`: the node's ledger has changes before it that were decided and not yet applied.
        """
        check_name("worker", hello.worker)
        check_name("node", hello.node)
        _check_capacity(hello.capacity)
        self._check_epoch(hello)
        self.check_member(hello)
        self._check_model(hello)
        self._check_pool(hello)
        known = self._pools.get(hello.node)
        if (
            known is None
            or hello.node not in self._ledgers
            or _shape_of(known) != _shape_of(hello.capacity)
            or _is_another_file(known, hello.capacity)
        ):
            if is_changing:
                raise Unavailable("accounts of its node's last pool are being closed", field="node", value=hello.node)
            self._open_pool(hello)
        self._pools[hello.node] = hello.capacity
        self.model = hello.model
        self._epochs[hello.worker] = hello.epoch
        self._epochs.move_to_end(hello.worker)
        if len(self._epochs) > EPOCHS_MAX:
            self._epochs.popitem(last=False)
        self._gone.pop(hello.worker, None)
        self._note_member(hello.member)
        return WorkerEntry(
            hello.worker,
            hello.node,
            hello.epoch,
            hello.capacity,
            hello.model,
            port,
            receiver=hello.receiver,
            pid=hello.pid,
            first_epoch=hello.first_epoch,
            member=hello.member,
        )

    def recover(self, opened: PoolOpened, joined: Sequence[WorkerJoined]) -> None:
        """A node of an earlier incarnation of the coordinator, and its epochs."""
        self._pools[opened.node] = opened.capacity
        self.model = opened.model
        for record in joined:
            self._epochs[record.worker] = max(record.epoch, self._epochs.get(record.worker, -1))
            self._note_member(record.member)

    def leave(self, worker: WorkerEntry, now: float, *, exit_proved: bool) -> None:
        """Remember how it was last."""
        if not self._ledgers[worker.node].has_live(worker.name):
            return  # it went before it was there
        row = msgspec.structs.replace(
            self._row(worker), state="disconnected", running=0, ranks_missing=(), awaits="", exit_proved=exit_proved
        )
        self._gone[worker.name] = _GoneWorker(row, now)
        if len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)

    def note_exit(self, name: str, epoch: int) -> None:
        """The process of an epoch that has left is proved gone."""
        gone = self._gone.get(name)
        if gone is not None and gone.row.epoch == epoch:
            self._gone[name] = gone._replace(row=msgspec.structs.replace(gone.row, exit_proved=True))

    def note_standbys(self, names: Sequence[str], ready: Sequence[str]) -> None:
        """Note which of these workers have a standby that is ready, as their supervisor tells."""
        for name in names:
            self._standbys[name] = "ready" if name in ready else "missing"
            self._standbys.move_to_end(name)
        while len(self._standbys) > GONE_MAX:
            self._standbys.popitem(last=False)

    def forget(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """List these disconnected workers no longer, all or none; one line per worker. The name of a group stands for
        its disconnected ranks. Raises BadInput, NotFound, WrongState."""
        if not names:
            raise BadInput("no worker is named", field="worker", value="", remedy="name at least one worker")
        chosen = dict.fromkeys(it for name in names for it in self._forgettable(name))
        for name in chosen:
            del self._gone[name]
        return tuple(f"{name}: forgotten" for name in chosen)

    def _forgettable(self, name: str) -> list[str]:
        workers = self._placement_table.workers
        ranks = [workers[name]] if name in workers else ranks_of(name, workers.values())
        if ranks:
            state = "is awaited after a restart of the coordinator" if ranks[0].awaited else "is connected"
            remedy = "stop its process, and wait until it is listed as disconnected"
            raise WrongState(state, field="worker", value=ranks[0].name, remedy=remedy)
        found = [name] if name in self._gone else [it for it, gone in self._gone.items() if gone.row.group == name]
        if not found:
            raise _no_worker(name)
        for gone in found:
            if epochs := sorted({epoch for ledger in self._ledgers.values() for epoch in ledger.unproved(gone)}):
                raise WrongState(
                    f"its lost epochs {epochs} have host pages in quarantine, and no exit is proved",
                    field="worker",
                    value=gone,
                    remedy=f"make sure that its process is gone, then: hisparse release-quarantine {gone} --i-am-sure",
                )
        return found

    def find(self, names: tuple[str, ...]) -> list[WorkerEntry]:
        """Connected workers by name, all of them for no name; the name of a group stands for its ranks.

        Raises NotFound, WrongState.
        """
        workers = self._placement_table.workers
        found: dict[str, WorkerEntry] = {} if names else dict(workers)
        for name in names:
            ranks = [workers[name]] if name in workers else ranks_of(name, workers.values())
            if not ranks and (name in self._gone or any(it.row.group == name for it in self._gone.values())):
                raise WrongState("is disconnected", field="worker", value=name, remedy="wait until it is back")
            if not ranks:
                raise _no_worker(name)
            found |= {it.name: it for it in ranks}
        return list(found.values())

    def capacities(self) -> list[tuple[str, WorkerCapacity]]:
        """Return the capacities of connected workers, equal ones twice at most; while there are none, of those seen
        last. Asked for each submission, and made when a worker has come or gone."""
        if self._capacities_since != self._placement_table.changes:
            self._capacities_since, self._capacities = self._placement_table.changes, []
            seen: dict[int, int] = {}
            for worker in self._placement_table.workers.values():
                seen[id(worker.capacity)] = times = seen.get(id(worker.capacity), 0) + 1
                if times <= 2:
                    self._capacities.append((worker.name, worker.capacity))
        return self._capacities or [(name, gone.row.capacity) for name, gone in self._gone.items()]

    # ---------------------------------------------------------------- rows

    def worker_rows(self, now: float) -> list[WorkerRow]:
        """Connected workers, then those that are gone, as they were last."""
        there = [it for it in self._placement_table.workers.values() if self._ledgers[it.node].has_live(it.name)]
        return [self._row(worker) for worker in there] + [gone.row_at(now) for gone in self._gone.values()]

    def pool_rows(self) -> list[PoolRow]:
        return [self._pool_row(node, ledger) for node, ledger in self._ledgers.items()]

    def _row(self, worker: WorkerEntry) -> WorkerRow:
        state = "disconnected" if worker.awaited else "connected"
        if worker.drain is not None and not worker.awaited:
            state = "draining" if worker.requests else "drained"
        free, member = self._ledgers[worker.node].budget(worker.name).free, worker.member
        heard = worker.port.stats()._asdict()
        return WorkerRow(
            worker=worker.name,
            node=worker.node,
            state=state,
            epoch=worker.epoch,
            running=worker.requests,
            capacity=worker.capacity,
            hot_chunks_free=free.hot_chunks,
            index_pages_free=free.index_pages,
            seats_free=free.seats,
            group=member.group if member else "",
            rank=member.rank if member else 0,
            ranks_missing=worker.ranks_missing,
            hot_sizing=worker.hot_sizing,
            standby=self._standbys.get(worker.name, ""),
            **{name: heard[name] for name in heard.keys() & set(WorkerRow.__struct_fields__)},
        )

    def _pool_row(self, node: str, ledger: Ledger) -> PoolRow:
        counts = ledger.count_pages()
        return PoolRow(
            node=node,
            host_pages=ledger.pages_total,
            free=counts.free,
            owned=counts.owned,
            shared=counts.shared,
            quarantined=counts.quarantined,
            cached=counts.cached,
            page_bytes=self._pools[node].page_bytes,
            reservations=ledger.holdings_count,
            workers=tuple(worker.name for worker in self._placement_table.of_node(node)),
        )

    # ---------------------------------------------------------------- checks

    def _check_epoch(self, hello: WorkerHello) -> None:
        connected = self._placement_table.workers.get(hello.worker)
        if connected is not None:
            raise Unavailable(f"epoch {connected.epoch} is still up", field="worker", value=hello.worker)
        if hello.epoch <= self._epochs.get(hello.worker, -1):
            raise WrongState("was declared down", field="epoch", value=hello.epoch, remedy="start a new epoch")

    def check_member(self, hello: WorkerHello) -> None:
        """Raise ConfigError or BadInput when it may not be the rank that it says it is."""
        latest = self._incarnations.get(hello.member.group, 0) if hello.member else 0
        check_member(hello, self._placement_table.workers.values(), latest)

    def _note_member(self, member: GroupMember | None) -> None:
        if member is None:
            return
        latest = max(member.incarnation, self._incarnations.pop(member.group, 0))
        self._incarnations[member.group] = latest
        if len(self._incarnations) > GROUPS_MAX:
            self._incarnations.popitem(last=False)

    def _check_model(self, hello: WorkerHello) -> None:
        model = self.model
        if (
            model is None
            or model == hello.model
            or not (self._placement_table.workers or self._placement_table.entries)
        ):
            return
        if self._placement_table.workers:
            differs, remedy = "differs from the other workers'", "use another coordinator"
        else:
            differs = f"differs from that of unfinished requests ({len(self._placement_table.entries)}),"
            remedy = "abort those requests, or use another coordinator"
        raise ConfigError(
            f"its model {hello.model.name} ({hello.model.fingerprint[:12]}, context {hello.model.context_max_tokens}) "
            f"{differs} {model.name} ({model.fingerprint[:12]}, context {model.context_max_tokens})",
            field="model",
            value=hello.worker,
            remedy=f"serve the same checkpoint with the same settings, or {remedy}",
        )

    def _check_pool(self, hello: WorkerHello) -> None:
        known, ledger = self._pools.get(hello.node), self._ledgers.get(hello.node)
        if known is None or ledger is None:
            return
        if _is_another_file(known, hello.capacity):
            self._check_pool_is_left(hello)
            return
        ours = (*_shape_of(hello.capacity), hello.capacity.pool_path)
        theirs = (*_shape_of(known), known.pool_path)
        in_use = self._placement_table.of_node(hello.node) or ledger.holdings_count or ledger.quarantines
        if ours != theirs and in_use:
            raise ConfigError(
                f"its host pool (pages, page bytes, rows, path) is {ours}, that of node {hello.node} is {theirs}",
                field="worker",
                value=hello.worker,
                remedy="give all workers of a node the same host_mem, pool_dir, draft_tokens and model",
            )

    def _check_pool_is_left(self, hello: WorkerHello) -> None:
        """The node's pool was created anew: its rows are gone, and with them what quarantines guard. Raise Unavailable
        while a worker may still use the one before."""
        leaving = any(it.node == hello.node and bool(it.worker) for it in self._placement_table.entries.values())
        if leaving or self._placement_table.of_node(hello.node):
            raise Unavailable(
                f"workers of node {hello.node} still use the host pool that was there before",
                field="pool_dir",
                value=hello.worker,
                remedy="stop them, or wait until they are declared down",
            )


def _no_worker(name: str) -> NotFound:
    return NotFound(
        "no worker or group of this name", field="worker", value=name[:NAME_CHARS_MAX], remedy="list workers"
    )


def _shape_of(capacity: WorkerCapacity) -> tuple[int, int, str]:
    """Return what a pool's rows depend on: when it changes, nothing of what lies there can be read any more."""
    return capacity.host_pages, capacity.page_bytes, capacity.row_format


def _is_another_file(known: WorkerCapacity, ours: WorkerCapacity) -> bool:
    return bool(known.pool_id and ours.pool_id and known.pool_id != ours.pool_id)


def _check_capacity(capacity: WorkerCapacity) -> None:
    """Raise ProtocolError for counts that no worker has."""
    classes = capacity.hot_size_classes
    bounds = (
        ("seats", capacity.seats, 1, GPU_COUNT_MAX),
        ("hot_chunks", capacity.hot_chunks, 1, GPU_COUNT_MAX),
        ("index_pages", capacity.index_pages, 1, GPU_COUNT_MAX),
        ("prompt_max_tokens", capacity.prompt_max_tokens, 1, CONTEXT_MAX_TOKENS),
        ("host_pages", capacity.host_pages, 1, HOST_PAGES_MAX),
        ("page_bytes", capacity.page_bytes, 1, GPU_COUNT_MAX),
        ("overshoot_tokens", capacity.overshoot_tokens, 0, CONTEXT_MAX_TOKENS),
        ("hot_size_classes", len(classes), 1, GPU_COUNT_MAX),
        ("hot_size_classes", min(classes, default=1), 1, GPU_COUNT_MAX),
    )
    for field, value, low, high in bounds:
        if not low <= value <= high:
            raise ProtocolError(f"must be {low} to {high}", field=field, value=value, remedy="fix the worker")
    if capacity.role not in ROLES:
        raise ProtocolError(f"must be one of {', '.join(ROLES)}", field="role", value=capacity.role, remedy="upgrade")
    if list(classes) != sorted(set(classes)):
        raise ProtocolError("must ascend", field="hot_size_classes", value=classes, remedy="fix the worker")
