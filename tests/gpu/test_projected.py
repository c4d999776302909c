"""Rows and index keys in one launch: what the model library's modules and RowFormat give in ten."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as library  # noqa: E402

from kernels.cuda.projected import index_rows, kv_rows  # noqa: E402
from kernels.row_format import RowFormat, hadamard, index_key_format, kv_row_format  # noqa: E402
from kernels.row_target import Angles, RowTarget  # noqa: E402
from worker.runners.attention import Rope  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32]
KINDS = ["fp4", "fp8", "bfloat16", "float32"]
ROPE, NOPE, DIM = 64, 128, 128
EPS = 1e-6


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def angles_of(tokens: int, dtype: torch.dtype, rope: int = ROPE) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat((half, half), -1) for half in draw(2, tokens, rope // 2, dtype=dtype))
    return cos, sin


def placed(form: RowFormat, tokens: int) -> RowTarget:
    """Places for every token but the second, in another order, among more rows than there are tokens."""
    places = torch.randperm(2 * tokens, device="cuda")[:tokens].int()
    places[1:2] = -1
    return RowTarget(torch.zeros(2 * tokens, form.row_bytes, dtype=torch.uint8, device="cuda"), places)


def check_rows(target: RowTarget, wanted: Tensor, form: RowFormat, *, share: float) -> None:
    """Rows are `wanted` uint8[tokens, row_bytes] but for a `share` of values a rounding away; no other is written."""
    assert target.places is not None
    written = target.places >= 0
    found = target.rows[target.places[written].long()]
    ours, theirs = (form.decode(one) for one in (found, wanted[written]))
    step = {"fp4": 1.0, "fp8": 2.0**-3, "bfloat16": 2.0**-7, "float32": 2.0**-16}[form.kind]
    torch.testing.assert_close(ours, theirs, rtol=step, atol=step * float(theirs.abs().max()) / 16)
    assert float((found != wanted[written]).float().mean()) <= share
    untouched = torch.ones(len(target.rows), dtype=torch.bool, device="cuda")
    untouched[target.places[written].long()] = False
    assert not target.rows[untouched].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "tokens", "interleaved"), [(128, 64, True), (20, 7, False), (1, 1, True)])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (128, 32)])
def test_a_row_is_normed_rotated_and_encoded(
    heads: int, tokens: int, interleaved: bool, latent: int, rope: int, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(tokens)
    form, (cos, sin) = kv_row_format(kind, latent, rope), angles_of(tokens, dtype, rope)
    products = draw(tokens, 1536 + latent + rope, dtype=dtype)[:, 1536:]
    norm = library.DeepseekV32RMSNorm(latent).to("cuda", dtype)
    norm.weight.data.normal_()
    queries = draw(tokens, heads, NOPE + rope, dtype=dtype)[..., NOPE:]
    whole = torch.zeros(tokens, heads, latent + rope, dtype=dtype, device="cuda")
    target, angles = placed(form, tokens), Angles(cos, sin, interleaved)
    kv_rows(form, products, norm.weight.data, EPS, angles, target, queries, whole[..., latent:])
    turn = library.apply_rotary_pos_emb_interleave if interleaved else library.apply_rotary_pos_emb
    key = products[:, latent:].view(tokens, 1, 1, rope)
    turned, turned_key = turn(queries.unsqueeze(2), key, cos.unsqueeze(1), sin.unsqueeze(1))
    assert torch.equal(whole[..., latent:], turned.squeeze(2))
    assert not whole[..., :latent].any()
    wanted = form.encode(torch.cat((norm(products[:, :latent]), turned_key.view(tokens, rope)), -1))
    check_rows(target, wanted, form, share=1e-2 if dtype == torch.bfloat16 else 0.5)
    alone = RowTarget(torch.zeros(tokens, form.row_bytes, dtype=torch.uint8, device="cuda"))
    kv_rows(form, products, norm.weight.data, EPS, angles, alone)
    assert target.places is not None
    written = target.places >= 0
    assert torch.equal(alone.rows[written], target.rows[target.places[written].long()]), "the same bits in any place"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "tokens", "interleaved", "last"),
    [(64, 64, False, False), (32, 5, True, False), (4, 1, False, True), (64, 600, False, False), (32, 64, False, True)],
)
def test_an_index_key_and_its_queries_turn_alike(
    heads: int, tokens: int, interleaved: bool, last: bool, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(tokens)
    form, (cos, sin) = index_key_format(kind, DIM), angles_of(tokens, dtype)
    rotation = hadamard(DIM, dtype, "cuda") if form.is_quantised else None
    products = draw(tokens, 1536 + DIM, dtype=dtype)[:, 1536:]
    norm = torch.nn.LayerNorm(DIM, eps=EPS).to("cuda", dtype)
    norm.weight.data.normal_()
    norm.bias.data.normal_()
    queries, raw = draw(tokens, heads, DIM, dtype=dtype), draw(tokens, heads, dtype=dtype)
    target, angles = placed(form, tokens), Angles(cos, sin, interleaved, last)
    about = form, products, (norm.weight.data, norm.bias.data, EPS), angles, rotation
    found, weights = index_rows(*about, target, queries, raw, heads**-0.5)
    rope = library.apply_rotary_pos_emb_interleave if interleaved else library.apply_rotary_pos_emb
    keys = norm(products).view(tokens, 1, 1, DIM)
    turned, key = Rope(rope, interleaved, last)(queries.unsqueeze(2), keys, cos.unsqueeze(1), sin.unsqueeze(1))
    if rotation is not None:
        turned, key = F.linear(turned, rotation), F.linear(key, rotation)
    kept = dtype if form.is_quantised else form.dtype
    assert found.dtype == kept
    step = torch.finfo(kept).eps
    # A rotated value is a sum of DIM terms, which the two add in different orders.
    atol = 0.0 if rotation is None else (16 if kept == torch.float32 else 4) * step
    torch.testing.assert_close(found, turned.squeeze(2).to(kept), rtol=step, atol=atol)
    assert torch.equal(weights, raw.float() * heads**-0.5)
    check_rows(target, form.encode(key.view(tokens, DIM)), form, share=5e-2 if dtype == torch.bfloat16 else 0.6)
    again = RowTarget(torch.zeros(tokens, form.row_bytes, dtype=torch.uint8, device="cuda"))
    empty, _ = index_rows(*about, again)
    assert empty.shape == (tokens, 0, DIM)
    assert target.places is not None
    written = target.places >= 0
    assert torch.equal(again.rows[written], target.rows[target.places[written].long()]), "the same bits in any place"
    some, _ = index_rows(
        form,
        products[:1],
        *about[2:3],
        Angles(cos[:1], sin[:1], interleaved, last),
        rotation,
        again,
        queries[:1],
        raw[:1],
    )
    assert torch.equal(some[0], found[0]), "a token's queries depend on that token alone"
