"""Log-probabilities on the device, beside log-softmax in float64."""

from __future__ import annotations

import torch

from protocol.logprobs import read_rows
from protocol.messages import LOGPROBS_MAX
from worker.runners.logprobs import allocate_rows, write_logprobs


def test_rows_are_log_softmax_of_the_logits() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, 500) * 8
    tokens = torch.tensor([7, 499, -1], dtype=torch.int32)  # the last is padding
    rows = allocate_rows(3)
    write_logprobs(logits, tokens, rows)
    wanted = logits.double().log_softmax(-1)
    for number, row in enumerate(read_rows(rows[:2].numpy())):
        best = wanted[number].topk(LOGPROBS_MAX)
        assert abs(row.logprob - float(wanted[number, tokens[number]])) < 1e-5
        assert [token for token, _ in row.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([it for _, it in row.top]).double(), best.values, atol=1e-5, rtol=0)


def test_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    logits, tokens = torch.randn(4, 300), torch.arange(4, dtype=torch.int32)
    together, alone = allocate_rows(4), allocate_rows(1)
    write_logprobs(logits, tokens, together)
    write_logprobs(logits[2:3], tokens[2:3], alone)
    assert torch.equal(together[2:3], alone)


def test_vocabulary_smaller_than_a_row() -> None:
    rows = allocate_rows(1)
    write_logprobs(torch.tensor([[0.0, 2.0]]), torch.tensor([0], dtype=torch.int32), rows)
    row = read_rows(rows[:, :5].numpy())[0]
    assert [token for token, _ in row.top] == [1, 0]
    assert row.logprob == row.top[1][1]
