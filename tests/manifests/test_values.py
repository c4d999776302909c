"""Values that are refused, with field, value and remedy; values that mean what they say."""

from __future__ import annotations

import re

import pytest

from hisparse.manifests import ManifestValues, manifests, read_values, values
from protocol.errors import ConfigError
from protocol.settings import Settings
from tests import ROOT

INT32_MAX = 2**31 - 1
SMALL = '[model]\nname = "m"\nclaim = "c"\n[[workers]]\nname = "w"\n'


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("x =", "--values", "values.toml"),
        ('[[workers]]\nname = "w"\n', "model", ""),
        ('[model]\nname = "m"\nclaim = "c"\n', "workers", ""),
        (SMALL + "gpu = 8\n", "workers[0].gpu", 8),
        (SMALL + 'gpus = "8"\n', "workers[0].gpus", "8"),
        (SMALL + "gpus = 0\n", "workers[0].gpus", 0),
        (SMALL + 'host_mem = "auto"\n', "workers[0].host_mem", "auto"),
        (SMALL + 'memory = "0"\n', "workers[0].memory", "0"),
        (SMALL + 'hugepages = "3MiB"\n', "workers[0].hugepages", "3MiB"),
        (SMALL + 'hugepages = "none"\n', "workers[0].hugepages", "none"),
        (SMALL + "pods = 200\ngpus = 8\n", "workers[0].pods", 200),
        (SMALL + "scaling = {groups_max = 0}\n", "workers[0].scaling.groups_max", 0),
        (SMALL + '[[workers]]\nname = "w"\n', "workers[1].name", "w"),
        (SMALL + '[[workers]]\nname = "http"\n', "workers[1].name", "http"),
        (SMALL + '[[workers]]\nname = "w-0"\n', "workers[1].name", "w-0"),
        ('name = "No"\n' + SMALL, "name", "No"),
        ('namespace = "a b"\n' + SMALL, "namespace", "a b"),
        (SMALL + "[http]\nreplicas = 0\n", "http.replicas", 0),
        (SMALL + '[coordinator]\njournal_storage = "much"\n', "coordinator.journal_storage", "much"),
        (SMALL + f'memory = "{"9" * 400}"\n', "workers[0].memory", "9" * 400),
        (SMALL + f"[http]\nreplicas = {INT32_MAX + 1}\n", "http.replicas", INT32_MAX + 1),
        (SMALL + f"groups = {INT32_MAX + 1}\n", "workers[0].groups", INT32_MAX + 1),
        (SMALL + f"start_s = {10**20}\n", "workers[0].start_s", 10**20),
        (SMALL + f"scaling = {{groups_max = {2**40}}}\n", "workers[0].scaling.groups_max", 2**40),
        (SMALL.replace('"c"', '""'), "model.claim", "''"),
        (SMALL.replace('"c"', '"c\\u0000"'), "model.claim", "'c\\x00'"),
        (SMALL.replace('"c"', '"C/d"'), "model.claim", "C/d"),
        (SMALL.replace('"m"', '""'), "model.name", "''"),
        (SMALL.replace('"m"', '"m\\u0000"'), "model.name", "'m\\x00'"),
        (SMALL.replace("[[", 'path = "a\\u0000b"\n[['), "model.path", "'a\\x00b'"),
        (SMALL.replace("[[", 'path = "/models"\n[['), "model.path", "/models"),
        (SMALL.replace("[[", 'path = "a/../.."\n[['), "model.path", "a/../.."),
        (SMALL + '[images]\nworker = ""\n', "images.worker", "''"),
        (SMALL + '[images]\nhttp = "a b"\n', "images.http", "a b"),
        (SMALL + '[images]\npull_secret = "a\\u0000"\n', "images.pull_secret", "'a\\x00'"),
        (SMALL + '[coordinator]\nstorage_class = "No"\n', "coordinator.storage_class", "No"),
        (SMALL + 'node_selector = {"" = "a"}\n', "workers[0].node_selector", "''"),
        (SMALL + 'node_selector = {a = "b c"}\n', "workers[0].node_selector.a", "b c"),
        (SMALL + '[monitoring]\nlabels = {a = "\\u0000"}\n', "monitoring.labels.a", "'\\x00'"),
    ],
)
def test_wrong_value_is_named(text: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_values(text, "values.toml")
    assert (caught.value.field, caught.value.value) == (field, str(value))
    assert caught.value.remedy


@pytest.mark.refuses("more than any machine has")
def test_size_that_kubernetes_cannot_count_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^coordinator\.journal_storage=2097152TiB: more than any machine has"):
        read_values(SMALL + '[coordinator]\njournal_storage = "2097152TiB"\n', "values.toml")


def test_largest_counts_and_usual_names_are_taken() -> None:
    more = f"groups = {INT32_MAX}\nnode_selector = {{'nvidia.com/gpu.product' = 'NVIDIA-H200'}}\n"
    text = SMALL.replace("[[", 'path = "models/GLM 5"\n[[').replace('"c"', '"nfs.models-1"') + more
    found = read_values(text + "[http]\nreplicas = 3\n", "values.toml")
    assert (found.workers[0].groups, found.model.path) == (INT32_MAX, "models/GLM 5")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ("{seat = 8}", "worker.seat"),
        ("{seats = 0}", "worker.seats"),
        ('{seats = "many"}', "worker.seats"),
        ("{metrics_port = 1}", "settings of workers w.metrics_port"),
        ('{transfer = "pigeon"}', "worker.transfer"),
    ],
)
def test_setting_that_a_worker_refuses_is_refused(settings: str, field: str) -> None:
    found = read_values(SMALL + f"settings = {settings}\n", "values.toml")
    with pytest.raises(ConfigError) as caught:
        manifests(found, "groups: []", {})
    assert caught.value.field == field
    assert caught.value.remedy


def test_role_is_one_that_workers_have() -> None:
    with pytest.raises(ConfigError, match=r"worker\.role"):
        manifests(read_values(SMALL + 'role = "idle"\n', "values.toml"), "groups: []", {})


def test_guide_lists_each_value() -> None:
    guide = (ROOT / "docs" / "kubernetes.md").read_text().split("## Values")[1].split("\n## ")[0]
    for kind in (ManifestValues, *vars(values).values()):
        if isinstance(kind, type) and issubclass(kind, Settings):
            for name in kind.__struct_fields__:
                assert re.search(rf"[`\[{{ ]{name}[`\],}}]", guide), name
