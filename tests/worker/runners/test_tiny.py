"""The tiny checkpoint: reproducible, told apart by its fingerprint, refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from protocol.errors import ConfigError
from worker.runners.checkpoint import fingerprint, read_config
from worker.runners.tiny import FAMILIES, PRINTABLE, write_tiny_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_determines_the_checkpoint(tmp_path: Path, family: str) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_tiny_checkpoint(tmp_path / name, family, seed=seed, index_topk=64, context_max_tokens=2_048)
    prints = [fingerprint(tmp_path / name) for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
    config = read_config(tmp_path / "a")
    assert (config["index_topk"], config["max_position_embeddings"]) == (64, 2_048)
    assert ("shared" in config.get("indexer_types", ())) == (family == "glm-5")
    head = load_file(tmp_path / "a" / "model.safetensors")["lm_head.weight"]
    assert sorted(head.abs().sum(1).nonzero().flatten().tolist()) == sorted(PRINTABLE)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"deepseek-v3\.2, glm-5"):
        write_tiny_checkpoint(tmp_path, "llama")
