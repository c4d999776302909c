"""The log of rounds, by which tests on GPUs tell a lost row from an exchange that miscarried."""

from __future__ import annotations

from pathlib import Path

from tests.support.group_rig import GroupRig
from tests.support.round_log import RoundLog, miscarried, parted
from tests.support.worker_rig import Rig
from tests.worker.group.test_ranks import SETTINGS, asks_of, spread, wrong
from worker.loop.batch import Status
from worker.runners.tiny import write_tiny_checkpoint


def test_ranks_receive_what_the_others_sent(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", "deepseek-v3.2", index_topk=32, context_max_tokens=1_024)
    asks = spread(asks_of(6, seed=7), 2)
    (tmp_path / "run").mkdir(mode=0o700)
    rig = GroupRig(tmp_path / "model", tmp_path / "run", asks, SETTINGS, log_rounds=True)
    try:
        drawn, states = rig.drawn(), rig.states()
    finally:
        rig.close()
    exchanged = [rank.exchanged for rank in drawn]
    assert {"prompt", "decode"} == {name.split()[0] for name in exchanged[0]}
    assert not miscarried(exchanged)
    assert not [row for rank in drawn for row in rank.stale]
    assert not wrong(tmp_path / "model", asks, drawn)
    assert (0, 65) in states
    other = {place: (hidden.clone(), topk.clone()) for place, (hidden, topk) in states.items()}
    assert not parted(states, other)
    _, topk = states[0, 65]
    other[0, 65][0][2, 7] += 1
    assert parted(states, other) == ["request 0, position 65: before index group 2"]
    selected = sorted(topk[1].tolist())
    topk[1, topk[1] == selected[5]] = 999
    assert parted(states, other) == [
        f"request 0, position 65: before index group 2; group 1 selected [999] for [{selected[5]}]"
    ]
    name = next(iter(exchanged[0]))
    exchanged[1][name][0] = exchanged[0][name][4] = "other bytes"
    assert miscarried(exchanged) == [
        f"{name}: rank 0 received other rows than rank 1 sent",
        f"{name}: rank 1 received other partial sums than rank 0 sent",
        f"{name}: rank 1 received other rows than rank 1 sent",
    ]


def test_a_row_that_changed_on_the_device_is_named() -> None:
    rig = Rig()
    life = rig.coordinator.create(0, 70, 8)
    assert rig.coordinator.admit(life, 0)
    rig.run_until(lambda: any(request.status is Status.RUNNING for request in rig.executor.held()))
    (request,) = rig.executor.held()
    log, state = RoundLog(rig), rig.executor.state
    log.keep_rows("before")
    state.row_words[0][1, request.memory.hot.chunks[1] * 64 + 3] ^= 1
    state.key_words[0, request.memory.index_pages[0] * 64 + 43] ^= 1
    log.keep_rows("behind")
    assert log.stale() == [
        "behind, request 0, seat 0, index page 0, layer 0, row 43",
        "behind, request 0, seat 0, page 1, layer 1, row 3",
    ]
