"""The benchmark of a prompt's layer: what it counts, and that it runs the worker's own units."""

from __future__ import annotations

import pytest
import torch

from benchmarks.prompt_layer import LAYERS, LayerPass, layers_of, operations
from benchmarks.rank import FAMILY, SynthesisedRanks
from benchmarks.serve.model import config_of
from worker.runners.checkpoint import geometry_of
from worker.runners.synthetic import synthetic_runner
from worker.weights.synth import published_config


def test_operations_of_a_layer_are_those_of_its_products_scores_and_attention() -> None:
    config, tokens, context = published_config(FAMILY, layers=LAYERS), 4_096, 32_768
    dense, sparse = layers_of(config)
    assert (dense, sparse) == (0, 3)
    attention = 7168 * 1536 + 1536 * 24_576 + 7168 * 576 + 128 * 512 * 256 + 16_384 * 7168
    indexer = 1536 * 8192 + 7168 * 128 + 7168 * 64
    seen = 64 * 128 * (context + (tokens + 1) / 2) + 2048 * 128 * (576 + 512)
    mlps = {dense: 3 * 7168 * 18_432, sparse: 9 * 3 * 7168 * 2048 + 256 * 7168}
    for layer, mlp in mlps.items():
        counted = operations(config, geometry_of(config, "fp8"), layer, tokens=tokens, context=context, of=8)
        assert counted == pytest.approx(2 * tokens * (attention + indexer + seen + mlp), rel=1e-4)


def test_a_pass_goes_through_a_layer_in_the_workers_units() -> None:
    config = config_of(LAYERS, tiny=True)
    ranks = SynthesisedRanks.draw(config, 2, 128, "cpu")
    runner = synthetic_runner(config, device="cpu", dtype="bfloat16", kv_dtype="fp8", collectives=ranks, rows_max=128)
    passed = LayerPass(runner, 256, 200, device="cpu")
    for layer in layers_of(config):
        before = passed.prompts.hidden.clone()
        passed.launch(layer)
        assert (passed.prompts.hidden != before).any(-1).all()
        assert passed.prompts.hidden.isfinite().all()
    assert not passed.state.tripwires.any()
    assert torch.equal(passed.state.slab_table.sort().values[0], torch.arange(8, dtype=torch.int32))
