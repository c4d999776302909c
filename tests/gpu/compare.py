"""A record of one backend held against the reference, step by step.

Which missed token goes to which of the chosen victims is not part of the contract. So of a swap_in the sets are
compared: tokens held and absent, copies made, counters, which entries are -1, and every byte behind the others. Then
the reference goes on from the recorded tables, having checked that they are each other's inverse. All else is equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.state import ABSENT, SLOT_MASK, MissPlan
from kernels.swap_in import replay_misses
from protocol.units import PAGE_TOKENS
from tests.gpu.program import OF_GROUP, TABLES, Machine, Op, Program, uploaded


class Difference(AssertionError):
    """Names program, place in the script, tensor and first element that differs."""


def check(program: Program, host: Tensor, record: Sequence[Sequence[Tensor]]) -> None:
    """Raises Difference unless `record`, what each op returned elsewhere, fits the reference."""
    machine = Machine(program, host, "cpu")
    for number, (op, got) in enumerate(zip(uploaded(program.ops, "cpu"), record, strict=True)):
        try:
            _check_op(machine, op, got)
        except Difference as difference:
            where = [arg for arg in op.args if not isinstance(arg, Tensor)]
            raise Difference(f"{program.label}, op {number} {op.call} {where}: {difference}") from None


def _check_op(machine: Machine, op: Op, got: Sequence[Tensor]) -> None:
    wanted = machine.run(op)
    if op.call == "swap_in":
        _check_swap_in(machine, op.args[0], op.args[1], wanted, got)
        return
    names = TABLES if op.call == "tables" else [f"output {number}" for number in range(len(wanted))]
    for name, want, have in zip(names, wanted, got, strict=True):
        same(name, want, have)


def _check_swap_in(machine: Machine, group: int, topk: Tensor, want: Sequence[Tensor], got: Sequence[Tensor]) -> None:
    state = machine.state
    plans = [MissPlan(*(outputs[number] for number in (2, 3, 4, 1))) for outputs in (want, got)]
    tables = [dict(zip((*OF_GROUP, "tripwires", "rejected"), outputs[5:12], strict=True)) for outputs in (want, got)]
    for name in ("stamp", "hits", "misses", "tripwires", "rejected"):
        same(name, tables[0][name], tables[1][name])
    same("plan.count", plans[0].count, plans[1].count)
    same("copies", *(_copies(plan) for plan in plans))
    same("entries of -1", want[0] < 0, got[0] < 0)
    same("tokens that are absent", *(table["slot_of"] == ABSENT for table in tables))
    same("tokens held", *(_held(machine, table["slot_token"]).sort(1).values for table in tables))
    for number, (rows, have) in enumerate(zip(want[12:], got[12:], strict=True)):
        same(f"bytes behind out_rows, section {number}", rows, have)
    for name in ("slot_of", "slot_token"):
        getattr(state, name)[group].copy_(tables[1][name])
    _check_inverse(machine, group)
    _check_out_rows(machine, group, topk, want[0], got[0])
    for layer in machine.geometry.layers_of_group(group):
        replay_misses(state, layer, plans[1])


def _copies(plan: MissPlan) -> Tensor:
    """Host places that a plan copies from, sorted within each row."""
    places = plan.host_page.long() * PAGE_TOKENS + plan.host_offset
    made = torch.arange(places.shape[1]) < plan.count.unsqueeze(1)
    return torch.where(made, places, -1).sort(1).values


def _managed_rows(machine: Machine) -> tuple[Tensor, Tensor]:
    """Managed seats int64[m], and device rows of their slots int64[m, slots], -1 where there is no chunk."""
    state = machine.state
    seats = (state.hot_slots > 0).nonzero().flatten()
    chunks = state.chunk_table[seats].long()
    rows = chunks.unsqueeze(-1) * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
    return seats, torch.where(chunks.unsqueeze(-1) < 0, -1, rows).flatten(1)


def _held(machine: Machine, slot_token: Tensor) -> Tensor:
    """Tokens in the slots of each managed seat, -1 elsewhere: int64[m, slots]."""
    _, rows = _managed_rows(machine)
    return torch.where(rows < 0, -1, slot_token[rows.clamp(min=0)].long())


def _check_inverse(machine: Machine, group: int) -> None:
    state = machine.state
    seats, _ = _managed_rows(machine)
    tokens = _held(machine, state.slot_token[group])
    filled = tokens >= 0
    pages = state.index_table[seats.unsqueeze(1), tokens.clamp(min=0) // PAGE_TOKENS].long()
    places = (pages * PAGE_TOKENS + tokens % PAGE_TOKENS).clamp(min=0)
    slots = torch.arange(tokens.shape[1]).expand_as(tokens)
    found = state.slot_of[group][places].long() & SLOT_MASK
    same("slot_of of the tokens in slots", torch.where(filled, slots, 0), torch.where(filled, found, 0))


def _check_out_rows(machine: Machine, group: int, topk: Tensor, want: Tensor, got: Tensor) -> None:
    """A managed row names slots that hold its tokens; a resident row, and padding, has no choice."""
    state, batch = machine.state, machine.batch
    seats = batch.seats.long().clamp(0, state.seats - 1)
    managed = (state.hot_slots[seats] > 0).unsqueeze(1) & (got >= 0)
    tokens = state.slot_token[group][got.clamp(min=0).long()]
    same("tokens at out_rows", torch.where(managed, topk, 0), torch.where(managed, tokens, 0))
    same("out_rows", torch.where(managed, 0, want), torch.where(managed, 0, got))


def same(name: str, want: Tensor, have: Tensor) -> None:
    if want.shape != have.shape or want.dtype != have.dtype:
        raise Difference(f"{name}: {have.dtype}{tuple(have.shape)}, not {want.dtype}{tuple(want.shape)}")
    if torch.equal(want, have):
        return
    places = (want != have).nonzero()
    at = tuple(places[0].tolist())
    raise Difference(f"{name}: {len(places)} differ, first at {at}: {have[at]}, not {want[at]}")
