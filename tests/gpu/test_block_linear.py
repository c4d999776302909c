"""Hopper's kernel of dense block-FP8 products: every plan, launches that overlap, streams and graphs side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper", allow_module_level=True)

from kernels.block_fp8 import block_experts, block_linear, decode_blocks  # noqa: E402
from kernels.block_weight import BlockFp8  # noqa: E402
from kernels.cuda.block_fp8 import EXPERT_TILES, experts  # noqa: E402
from kernels.cuda.block_linear import linear  # noqa: E402
from kernels.cuda.block_plans import (  # noqa: E402
    APART_TOKENS,
    EXPERT_PLANS,
    ExpertPlans,
    LinearPlan,
    crossover_of,
    expert_plans_of,
    fits,
    plan_of,
    plans,
    work_of,
)
from tests.gpu.test_block_fp8 import activations, off, on_gpu  # noqa: E402
from tests.kernels.test_block_fp8 import draw  # noqa: E402

PLANS = sorted(set(plans()))
SHAPES = [(576, 7168), (256, 1152), (1536, 512), (128, 7168), (64, 128), (200, 304), (24, 48), (2, 16), (1100, 1104)]
TOKENS = [1, 3, 16, 17, 40, 65, 130, 600]
#: Parts of tiles in most ranges: 7 tiles of 256 rows, 40 blocks of K.
SPLIT = (1792, 5120)


def weight_of(shape: tuple[int, int], seed: int = 0) -> BlockFp8:
    weight = on_gpu(draw(*shape, seed=seed))
    torch.cuda.synchronize()  # no kernel that writes it is just ahead
    return weight


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_is_right_at_every_edge(plan: LinearPlan) -> None:
    for shape in SHAPES:
        assert fits(*shape)
        weight = weight_of(shape)
        decoded = decode_blocks(weight, torch.bfloat16)
        for tokens in TOKENS:
            hidden = activations(tokens, shape[1])
            got = linear(hidden, weight, plan)
            assert off(got, hidden.double() @ decoded.double().T) < 4e-3, (shape, tokens)
            assert torch.equal(got, linear(hidden, weight, plan))  # the same bits again
            picked = torch.randint(0, shape[1], (tokens,), device="cuda")
            rows = torch.nn.functional.one_hot(picked, shape[1]).bfloat16()
            assert torch.equal(linear(rows, weight, plan), decoded.T[picked]), (shape, tokens)


def test_a_rows_bits_do_not_depend_on_its_place() -> None:
    weight = weight_of((8192, 8192))
    for tokens in (16, 32, 64, 128, APART_TOKENS):
        hidden = activations(tokens, 8192)
        order = torch.randperm(tokens, device="cuda")
        assert torch.equal(block_linear(hidden, weight)[order], block_linear(hidden[order], weight))


def test_hidden_that_begins_inside_of_a_vector_is_read() -> None:
    weight = weight_of((576, 1024))
    hidden = activations(1, 3 * 1024 + 1)[0, 1:].view(3, 1024)
    assert torch.equal(linear(hidden, weight, PLANS[0]), linear(hidden.clone(), weight, PLANS[0]))


def test_large_weights_take_the_kernel_up_to_their_crossover() -> None:
    weight = weight_of((8192, 8192))
    scratch = torch.full((8192 * 8192,), 7, dtype=torch.bfloat16, device="cuda")
    most = crossover_of(8192, 8192)
    hidden = activations(most, 8192)
    for tokens in (1, 33, most - 1):
        plan = plan_of(8192, 8192, tokens)
        assert plan
        assert torch.equal(block_linear(hidden[:tokens], weight, scratch), linear(hidden[:tokens], weight, plan))
    assert bool((scratch == 7).all())
    got = block_linear(hidden, weight, scratch)
    assert torch.equal(scratch.view(8192, 8192), decode_blocks(weight, torch.bfloat16))
    assert off(got, linear(hidden, weight, PLANS[-1])) < 4e-3


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_product_awaits_the_kernel_that_writes_its_activations(plan: LinearPlan) -> None:
    """Launches follow each other without a pause, each of what the one ahead wrote, in memory that is used again."""
    first, second = weight_of(SPLIT), weight_of(SPLIT[::-1], seed=1)
    start = activations(plan.tokens, SPLIT[1])

    def chain(pause: bool) -> list[Tensor]:
        results, hidden = [], start
        for turn in range(30):
            for weight in (first, second):
                hidden = linear(hidden, weight, plan)
                if pause:
                    torch.cuda.synchronize()
            hidden = hidden / hidden.float().norm().bfloat16() * 100 if turn % 2 else torch.tanh(hidden)
            results.append(hidden)
        return results

    apart, together = chain(True), chain(False)
    assert all(map(torch.equal, apart, together))


def replays(plan: LinearPlan, weight: BlockFp8, hidden: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            out = linear(hidden, weight, plan)
    return graph, out


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_streams_and_graphs_side_by_side_share_no_flags(plan: LinearPlan) -> None:
    work = work_of(*SPLIT, plan.tokens, plan, torch.cuda.get_device_properties(0).multi_processor_count)
    assert work.splits_tiles
    weights = [weight_of(SPLIT, seed) for seed in range(4)]
    hidden = [activations(plan.tokens, SPLIT[1]) for _ in range(4)]
    wanted = [linear(*pair, plan) for pair in zip(hidden, weights, strict=True)]
    graphs = [replays(plan, *pair) for pair in zip(weights[:2], hidden[:2], strict=True)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (graph, out) in zip(streams[:2], graphs, strict=True):
            with torch.cuda.stream(stream):
                out.zero_()
                graph.replay()
        eager = []
        for number in (2, 3):
            with torch.cuda.stream(streams[number]):
                eager += [(number, linear(hidden[number], weights[number], plan)) for _ in range(8)]
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted[number]) for number, out in eager)
        assert all(torch.equal(out, one) for (_, out), one in zip(graphs, wanted[:2], strict=True))
        for rows in hidden[:2]:  # a graph reads what is there when it is replayed
            rows.neg_()
        wanted[:2] = [-one for one in wanted[:2]]


def test_a_graph_is_right_after_graphs_captured_behind_it_are_gone() -> None:
    plan, weight, hidden = PLANS[2], weight_of(SPLIT), activations(64, SPLIT[1])
    wanted = linear(hidden, weight, plan)
    kept = replays(plan, weight, hidden)
    for _ in range(3):
        other = replays(plan, weight, hidden)
        other[0].replay()
        del other
    torch.cuda.empty_cache()
    for _ in range(3):
        kept[1].zero_()
        kept[0].replay()
        assert torch.equal(kept[1], wanted)


BY_EXPERTS = [pair for pair in EXPERT_PLANS.values() if pair]
#: Experts, middle, width: whole tiles of rows, and not; a ragged block; fewer values than a stage has.
EXPERT_SHAPES = [(5, 512, 384), (3, 208, 304), (2, 80, 1104), (1, 48, 16)]


def expert_weights(held: int, middle: int, width: int) -> tuple[BlockFp8, BlockFp8, BlockFp8]:
    shapes = (held, middle, width), (held, middle, width), (held, width, middle)
    first, second, third = (on_gpu(draw(*shape, seed=seed)) for seed, shape in enumerate(shapes))
    torch.cuda.synchronize()
    return first, second, third


@pytest.mark.parametrize("pair", BY_EXPERTS, ids=str)
def test_experts_of_every_pair_of_plans_are_those_of_torch(pair: ExpertPlans) -> None:
    for held, middle, width in EXPERT_SHAPES:
        assert fits(middle, width)
        assert fits(width, middle)
        weights = expert_weights(held, middle, width)
        plain = [decode_blocks(one, torch.bfloat16).double() for one in weights]
        for tokens in (1, 16, 17, 130, 300):
            hidden = activations(tokens, width)
            chosen = torch.rand(tokens, held + 3, device="cuda").argsort(1)[:, :2].contiguous() - 1  # some not held
            shares = torch.rand(tokens, 2, device="cuda")
            got = experts(hidden, chosen, shares, *weights, 1, held + 3, tiles=pair)
            wanted = torch.zeros(tokens, width, device="cuda", dtype=torch.float64)
            for expert in range(held):
                share = (shares.double() * (chosen == expert + 1)).sum(1, keepdim=True)
                one = hidden.double()
                middles = torch.nn.functional.silu(one @ plain[0][expert].T) * (one @ plain[1][expert].T)
                wanted += share * (middles @ plain[2][expert].T)
            unheld = ~((chosen >= 1) & (chosen < held + 1)).any(1)
            assert not got[unheld].any()
            if not bool(unheld.all()):
                assert off(got, wanted) < 1.5e-2, (held, middle, width, tokens)
            again = experts(hidden, chosen, shares, *weights, 1, held + 3, tiles=pair)
            assert torch.equal(got, again)


@pytest.mark.parametrize("pair", BY_EXPERTS, ids=str)
def test_an_experts_row_does_not_depend_on_how_others_are_routed(pair: ExpertPlans) -> None:
    matrices = expert_weights(4, 512, 640)
    hidden, shares = activations(120, 640), torch.rand(120, 2, device="cuda")

    def row(chosen: Tensor, place: int) -> Tensor:
        moved = hidden.clone()
        moved[[0, place]] = moved[[place, 0]]
        given, weights = chosen.clone(), shares.clone()
        given[place], weights[place] = torch.tensor([1, 3], device="cuda"), shares[0]
        return experts(moved, given, weights, *matrices, 0, 4, tiles=pair)[place]

    alone = row(torch.full((120, 2), -1, device="cuda"), 0)
    for place in (0, 63, 119):
        chosen = torch.rand(120, 6, device="cuda").argsort(1)[:, :2] - 1
        assert torch.equal(row(chosen.contiguous(), place), alone)
    assert torch.equal(
        row(torch.tensor([1, 3], device="cuda").repeat(120, 1), 100), alone
    )  # several tiles of an expert


def test_large_experts_take_the_kernel() -> None:
    weights = expert_weights(2, 2048, 2048)
    hidden, shares = activations(24, 2048), torch.rand(24, 2, device="cuda")
    chosen = torch.rand(24, 16, device="cuda").argsort(1)[:, :2].contiguous()
    pair = expert_plans_of(2048, 2048, 3)
    assert pair
    arguments = hidden, chosen, shares, *weights, 0, 16
    own = experts(*arguments, tiles=pair)
    assert torch.equal(block_experts(*arguments), own)
    by_triton = experts(*arguments, tiles=EXPERT_TILES[8])
    assert off(own, by_triton) < 1e-2
