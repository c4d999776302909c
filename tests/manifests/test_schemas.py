"""Each printed object is valid: those of Kubernetes by its published schemas, custom ones by those of schemas/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.manifests.examples import NAMES, objects, of_kind, templates

VERSION = "1.37"
CUSTOM = {
    kind: json.loads((Path(__file__).parent / "schemas" / f"{kind.lower()}.json").read_text())
    for kind in ("LeaderWorkerSet", "ServiceMonitor", "PrometheusRule")
}


def validate(found: dict[str, Any]) -> None:
    if found["kind"] in CUSTOM:
        jsonschema.validate(found, CUSTOM[found["kind"]])
    else:
        kubernetes_validate.validate(found, VERSION, strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_objects_are_valid(name: str) -> None:
    documents = objects(name)
    for it in documents:
        validate(it)
    for made_by, template in templates(of_kind(name, "LeaderWorkerSet")):
        validate({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": made_by}, "template": template})
    about = [(it["kind"], it["metadata"]["namespace"], it["metadata"]["name"]) for it in documents]
    assert len(about) == len(set(about)), "two objects of one name"
    assert len({namespace for _, namespace, _ in about}) == 1


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("StatefulSet", ("spec", "template", "spec", "hostPath")),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "restart")),
        ("ServiceMonitor", ("spec", "port")),
        ("PrometheusRule", ("spec", "rules")),
    ],
)
def test_unknown_field_is_found(kind: str, path: tuple[str, ...]) -> None:
    found = of_kind(NAMES[0], kind)[0]
    inner = found
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = "x"
    with pytest.raises(jsonschema.ValidationError):
        validate(found)
