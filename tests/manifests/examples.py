"""The three shown value files, and what `hisparse manifests` prints for them, read back by another reader of YAML."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml
from click.testing import CliRunner

from hisparse.cli import main
from hisparse.manifests import ManifestValues, read_values
from tests import ROOT

EXAMPLES: Final = sorted((ROOT / "examples" / "kubernetes").glob("*.toml"))
NAMES: Final = [it.stem for it in EXAMPLES]


def path_of(name: str) -> Path:
    return next(it for it in EXAMPLES if it.stem == name)


@cache
def values_of(name: str) -> ManifestValues:
    return read_values(path_of(name).read_text(), f"{name}.toml")


@cache
def printed(name: str) -> str:
    done = CliRunner().invoke(main, ["manifests", "--values", str(path_of(name))])
    assert done.exit_code == 0, done.output
    return done.output


def objects(name: str) -> list[dict[str, Any]]:
    """New ones at each call: tests change them."""
    return list(yaml.load_all(printed(name), Loader=yaml.CSafeLoader))


def of_kind(name: str, kind: str) -> list[dict[str, Any]]:
    return [it for it in objects(name) if it["kind"] == kind]


def templates(documents: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pod templates, by the name of what makes pods of them."""
    for it in documents:
        if it["kind"] in ("StatefulSet", "Deployment"):
            yield it["metadata"]["name"], it["spec"]["template"]
        elif it["kind"] == "LeaderWorkerSet":
            yield it["metadata"]["name"], it["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def environ(container: dict[str, Any], **given: str) -> dict[str, str]:
    """As the kubelet makes it, in order. `given` stands for what it reads of the pod."""
    found: dict[str, str] = {}
    for it in container["env"]:
        value = it.get("value", given.get(it["name"], f"{it['name'].lower()}-0"))
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        assert "$(" not in value, f"{it['name']}={value} names a variable that is not set yet"
        found[it["name"]] = value
    return found
