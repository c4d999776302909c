"""The families that are served. A family is a row here and a module beside this one. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from protocol.errors import ConfigError
from worker.families.axk2 import AXK2
from worker.families.base import Family
from worker.families.deepseek_v32 import DEEPSEEK_V32
from worker.families.glm_moe_dsa import GLM_MOE_DSA
from worker.families.hy_v4 import HY_V4
from worker.families.latent import LatentFamily
from worker.families.minimax_m3 import MINIMAX_M3

#: By model_type.
FAMILIES: Final[dict[str, Family]] = {
    family.model_type: family for family in (DEEPSEEK_V32, GLM_MOE_DSA, AXK2, HY_V4, MINIMAX_M3)
}


def names() -> list[str]:
    """Return the names of all families."""
    return [family.name for family in FAMILIES.values()]


def latent_names() -> list[str]:
    """Return the names of the families with latent attention."""
    return [family.name for family in FAMILIES.values() if isinstance(family, LatentFamily)]


def models() -> list[str]:
    """Return the names of all published models whose shapes are known here."""
    return [model for family in FAMILIES.values() for model in family.models]


def family_of(config: Any) -> Family:
    """Return the family of `config`, which has the fields of config.json as attributes. Raises ConfigError."""
    kind = getattr(config, "model_type", None)
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    remedy = f"use one of {', '.join(FAMILIES)}"
    raise ConfigError("is not served", field="config.json model_type", value=kind, remedy=remedy)


def latent_family_of(config: Any) -> LatentFamily:
    """Return the family of `config` if the runner of latent attention serves it. Raises ConfigError."""
    family = family_of(config)
    if isinstance(family, LatentFamily):
        return family
    served = ", ".join(kind for kind, one in FAMILIES.items() if isinstance(one, LatentFamily))
    text = f"{family.name} has no latent attention, which this runner computes"
    raise ConfigError(text, field="config.json model_type", value=config.model_type, remedy=f"use one of {served}")


def library_config(path: str | Path) -> Any:
    """Return the model library's config object of a config.json, or of a directory with one, as models are made of it.
    Raises what the library does."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(path)
    return family_of(found).of_library(found)


def family_named(name: str) -> Family:
    """Return the family of this name, or of the published model `name`. Raises ConfigError."""
    for family in FAMILIES.values():
        if name == family.name or name in family.models:
            return family
    known = dict.fromkeys((*names(), *models()))
    raise ConfigError("unknown family", field="family", value=name, remedy=f"use one of {', '.join(known)}")
