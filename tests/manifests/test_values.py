"""Values that are refused, with field, value and remedy; values that mean what they say."""

from __future__ import annotations

import re

import pytest

from hisparse.manifests import ManifestValues, manifests, read_values, values
from protocol.errors import ConfigError
from protocol.settings import Settings
from tests import ROOT

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
    ],
)
def test_wrong_value_is_named(text: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_values(text, "values.toml")
    assert (caught.value.field, caught.value.value) == (field, str(value))
    assert caught.value.remedy


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
