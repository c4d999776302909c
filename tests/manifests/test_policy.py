"""No container runs as root, without limits, or with a key in its environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.manifests.examples import NAMES, objects, templates

#: Names of variables that hold secrets, unless they name a file or a directory.
SECRETS = re.compile(r"(?:^|_)(KEYS?|SECRET|TOKEN|PASSWORD|CREDENTIALS?)(?:_|$)")


def violations(documents: list[dict[str, Any]]) -> Iterator[str]:
    for name, template in templates(documents):
        spec = template["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            yield from (f"{name}, {container['name']}: {it}" for it in _container(spec, container))
        if spec.get("enableServiceLinks", True):
            yield f"{name}: Services become variables, which processes refuse"
        if spec.get("automountServiceAccountToken", True):
            yield f"{name}: has a token of the API server"
        for it in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(it):
                yield f"{name}: {it}"
        if any("hostPath" in volume for volume in spec["volumes"]):
            yield f"{name}: mounts a directory of its node"


def _container(spec: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    security = spec.get("securityContext", {}) | container.get("securityContext", {})
    if not security.get("runAsNonRoot") or not security.get("runAsUser"):
        yield "may run as root"
    if security.get("allowPrivilegeEscalation", True) or security.get("privileged"):
        yield "may get privileges"
    if security.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "has capabilities"
    if not security.get("readOnlyRootFilesystem"):
        yield "may write to its image"
    if not container.get("resources", {}).get("limits", {}).keys() >= {"cpu", "memory"}:
        yield "has no limits"
    if "envFrom" in container:
        yield "takes variables from elsewhere"
    for it in container.get("env", ()):
        is_path = it.get("value", "").startswith("/")
        if "secretKeyRef" in it.get("valueFrom", {}) or (SECRETS.search(it["name"]) and not is_path):
            yield f"has a key in {it['name']}"


@pytest.mark.parametrize("name", NAMES)
def test_printed_manifests_keep_the_policy(name: str) -> None:
    documents = objects(name)
    assert len(list(templates(documents))) >= 3
    assert list(violations(documents)) == []


PLANTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "may run as root": lambda spec: spec["securityContext"].update(runAsUser=0),
    "may get privileges": lambda spec: spec["containers"][0]["securityContext"].update(privileged=True),
    "has capabilities": lambda spec: spec["initContainers"][0]["securityContext"].pop("capabilities"),
    "may write to its image": lambda spec: spec["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"),
    "has no limits": lambda spec: spec["initContainers"][0]["resources"].pop("limits"),
    "takes variables from elsewhere": lambda spec: spec["containers"][0].update(envFrom=[]),
    "has a key in API_KEY": lambda spec: spec["containers"][0]["env"].append({"name": "API_KEY", "value": "x"}),
    "Services become variables": lambda spec: spec.pop("enableServiceLinks"),
    "has a token": lambda spec: spec.pop("automountServiceAccountToken"),
    "hostIPC": lambda spec: spec.update(hostIPC=True),
    "mounts a directory": lambda spec: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
}


@pytest.mark.parametrize("violation", PLANTED)
def test_planted_violation_is_found(violation: str) -> None:
    documents = objects(NAMES[0])
    for _, template in templates(documents):
        PLANTED[violation](template["spec"])
        break
    found = list(violations(documents))
    assert found
    assert all(violation in it for it in found)
