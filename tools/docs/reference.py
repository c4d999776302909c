"""docs/commands.md and docs/settings.md, from the commands and settings themselves.

python -m tools.docs.reference docs      write both anew; a test holds pages and code equal
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from hisparse.cli import main
from hisparse.console.meanings import meanings
from hisparse.console.options import EXIT_MEANINGS, SettingOption, common_option_lines


def pages() -> Mapping[str, str]:
    """Each page by the name of its file."""
    return {"commands.md": _commands_page(), "settings.md": _settings_page()}


def _commands_page() -> str:
    commands = [
        (_code(_usage(path, command)), _cell(command.help or ""), _options(command))
        for path, command in _commands(main)
    ]
    common = [(_code(option), _cell(text)) for option, text in common_option_lines()]
    codes = [(str(code), meaning) for code, meaning in EXIT_MEANINGS.items()]
    return "\n".join(
        (
            "# Commands",
            "",
            "Written by `make docs`. `hisparse COMMAND --help` says what each option does. Options of settings are in",
            "[settings.md](settings.md).",
            *_table("command | what it does | options", commands),
            *_table("option of every command | meaning", common),
            *_table("exit code | meaning", codes),
            "",
        )
    )


def _settings_page() -> str:
    import msgspec

    from protocol.config import SECTIONS, setting_text

    flags = {option.name: option.opts[0] for _, command in _commands(main) for option in command.params}
    lines = [
        "# Settings",
        "",
        "Written by `make docs`. `seats = 16` in the table `[worker]` of the TOML file, `HISPARSE_WORKER_SEATS=16` and",
        "`--set worker.seats=16` are the same. `hisparse config show` prints what is set, and where.",
    ]
    for section, kind in SECTIONS.items():
        rows = []
        for field in msgspec.structs.fields(kind):
            flag = flags.get(f"setting_{section}_{field.name}", "")
            meaning = _cell(meanings()[f"{section}.{field.name}"])
            rows.append((_code(f"{section}.{field.name}"), _code(setting_text(field.default)), _code(flag), meaning))
        lines += ["", f"## {section}", *_table("setting | default | option | meaning", rows)]
    return "\n".join((*lines, ""))


def _commands(group: click.Group, path: str = "hisparse") -> Iterator[tuple[str, click.Command]]:
    """All commands that do something, with the words that call them."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield f"{path} {name}", command


def _usage(path: str, command: click.Command) -> str:
    arguments = (argument for argument in command.params if isinstance(argument, click.Argument))
    return " ".join((path, *(argument.make_metavar(click.Context(command)) for argument in arguments)))


def _options(command: click.Command) -> str:
    """Without those of settings."""
    shown = (option for option in command.params if isinstance(option, click.Option) and not option.hidden)
    own = (option for option in shown if not isinstance(option, SettingOption))
    return ", ".join(_code("/".join((option.opts[-1], *option.secondary_opts))) for option in own)


def _table(head: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    return ["", f"| {head} |", "|---" * (head.count("|") + 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _cell(text: str) -> str:
    return " ".join(text.replace("\b", "").split()).replace("|", "\\|")


if __name__ == "__main__":
    for name, page in pages().items():
        Path(sys.argv[1], name).write_text(page)
