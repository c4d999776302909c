"""`hisparse config`: what is set, and where it was set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hisparse.console.options import output_option, with_config

if TYPE_CHECKING:
    from protocol.settings import Config


@click.group(short_help="Show settings and their origin.")
def config() -> None:
    """Settings of every process. An option overrides an environment variable, which overrides the TOML file, which
    overrides the default."""


@config.command(short_help="Print all settings.")
@output_option
@with_config(origins=True)
def show(config: Config, origins: dict[str, str], output: str) -> int:
    """Print the value of each setting, as a process that is started here would use it, and its origin.

    The origin is the path of the file, the name of the environment variable, the command line, or default. Keys and
    secrets are never shown: settings name their files, which are not read.
    """
    import msgspec

    from hisparse.console.output import emit
    from hisparse.console.table import Column
    from protocol.config import SECTIONS, setting_text

    class SettingRow(msgspec.Struct):
        setting: str
        value: object
        origin: str

    rows = [
        SettingRow(f"{section}.{field}", value, origins.get(f"{section}.{field}", "default"))
        for section in SECTIONS
        for field, value in msgspec.structs.asdict(getattr(config, section)).items()
    ]
    columns: list[Column[SettingRow]] = [
        Column("SETTING", lambda row: row.setting),
        Column("VALUE", lambda row: setting_text(row.value)),
        Column("ORIGIN", lambda row: row.origin),
    ]
    emit(rows, columns, output)
    return 0
