"""Differences between families stand in their modules: no other source names one."""

from __future__ import annotations

import re
from pathlib import Path

from tests import ROOT
from worker.families.table import FAMILIES, family_named, models, names

PACKAGES = ("basics", "coordinator", "hisparse", "kernels", "metrics", "protocol", "worker")


def test_no_other_source_names_a_family() -> None:
    """Names of a family: its model_type, or a class of the model library."""
    kinds = {word for family in FAMILIES.values() for word in (family.model_type, family.config_class)}
    classes = {family.config_class.removesuffix("Config") for family in FAMILIES.values()}
    named = re.compile(
        "|".join(rf"\b{word}\b" for word in kinds) + "|" + "|".join(rf"\b{word}[A-Z]" for word in classes)
    )
    sources = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in sources if named.search(file.read_text())}
    assert {Path(file).parent for file in found} == {Path("worker/families")}


def test_families_and_their_models_are_found_by_name() -> None:
    for family in FAMILIES.values():
        assert family.name in family.models
        assert all(family_named(model) is family for model in family.models)
    assert len(set(models())) == len(models()) >= len(names())
