"""Environments of processes, checked by the code that reads them in the pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.config import ENVIRONMENT_PREFIX, HostFacts, build, setting_text
from protocol.errors import ConfigError


def check_settings(section: str, settings: Mapping[str, Any], fixed: Mapping[str, str], field: str) -> dict[str, str]:
    """`fixed` variables and those of `settings`, which are of the table `section`. Raises ConfigError when a process
    would refuse them, or when one of `settings` is among `fixed`."""
    prefix = f"{ENVIRONMENT_PREFIX}{section}_".upper()
    for name, value in settings.items():
        if prefix + name.upper() in fixed:
            raise ConfigError(
                "is set by the manifests", field=f"{field}.{name}", value=value, remedy="leave it out of settings"
            )
    build({section: dict(settings)}, fixed, {}, HostFacts("host", 1, 10001), file_name=f"{field} of the values")
    return dict(fixed) | {prefix + name.upper(): setting_text(value) for name, value in settings.items()}
