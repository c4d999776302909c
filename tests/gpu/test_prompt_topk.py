"""prompt_topk on the GPU chooses what the reference chooses, where arithmetic is exact."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernels.cuda import prompt_topk as room  # noqa: E402
from kernels.cuda.launch import prepare  # noqa: E402
from kernels.prompt_pieces import PromptPiece, PromptPieces  # noqa: E402
from kernels.prompt_topk import prompt_topk  # noqa: E402
from tests.kernels.test_prompt_topk import DIM, HEADS, PIECES, TOPK, exact, state_with_keys, whole  # noqa: E402


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("scores_max", [room.SCORES_MAX, 500], ids=["one launch", "few tokens a launch"])
def test_each_token_selects_as_the_reference(
    monkeypatch: pytest.MonkeyPatch, kind: str, pieces: list[PromptPiece], scores_max: int
) -> None:
    monkeypatch.setattr(room, "SCORES_MAX", scores_max)
    cpu, gpu = state_with_keys(kind), state_with_keys(kind, "cuda")
    prepare(gpu)
    draw = torch.Generator().manual_seed(pieces[0].start)
    rows = max(piece.row + piece.tokens for piece in pieces) + 1
    queries = exact(rows, HEADS, DIM, draw=draw).to(torch.float32 if kind == "float32" else torch.bfloat16)
    weights = whole(rows, HEADS, draw=draw)
    found = [torch.full((2, rows, TOPK), 99, dtype=torch.int32, device=device) for device in ("cpu", "cuda")]
    prompt_topk(cpu, 0, PromptPieces.of(pieces), queries, weights, 0.25, *found[0])
    prompt_topk(gpu, 0, PromptPieces.of(pieces, "cuda"), queries.cuda(), weights.cuda(), 0.25, *found[1])
    assert torch.equal(found[1].cpu(), found[0])
    assert not gpu.tripwires.any()
