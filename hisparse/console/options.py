"""Shared by every command: options for settings, exit codes, errors in one line on stderr.

Imports only click, `hisparse.clashes` and `hisparse.console.meanings`: a name clash is reported without `protocol`,
which may be another package.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import click

from hisparse.clashes import NameClash, check_packages
from hisparse.console.meanings import meanings

if TYPE_CHECKING:
    from protocol.errors import HiSparseError
    from protocol.settings import Config

#: Exit code by `HiSparseError.code`. 0, 1 and 130 have their usual meaning, see EXIT_MEANINGS.
EXIT_CODES: Final = {
    "bad_input": 2,
    "not_found": 3,
    "wrong_state": 4,
    "capacity": 5,
    "unavailable": 6,
    "protocol": 7,
    "config": 8,
    "not_allowed": 9,
    "internal": 70,
}
#: What click calls a number in an error, the longer name first, and what a person calls it.
CLICK_TYPES: Final = {
    "integer range": "a whole number",
    "integer": "a whole number",
    "float range": "a number",
    "float": "a number",
}
#: Largest number of tokens; a text of as many digits is larger.
TOKENS_MAX: Final = 2**31 - 1
TOKEN_DIGITS_MAX: Final = 11
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
#: Of a worker of a group: protocol.errors.EXIT_PEER_LOST, which a command's help does not import.
EXIT_PEER_LOST: Final = 71
EXIT_MEANINGS: Final = {
    0: "done",
    EXIT_FAILED: "it ran, and the outcome is bad: a request aborted or failed, a mismatch or a leak in the demo",
    EXIT_CODES["bad_input"]: "bad usage or bad input",
    EXIT_CODES["not_found"]: "no such request or worker",
    EXIT_CODES["wrong_state"]: "right command, wrong state (retract a finished request)",
    EXIT_CODES["capacity"]: "does not fit, now or ever (the message says which)",
    EXIT_CODES["unavailable"]: "no coordinator answers, or it is draining; the time of --timeout has passed",
    EXIT_CODES["protocol"]: "the peer speaks another protocol",
    EXIT_CODES["config"]: "a setting was refused",
    EXIT_CODES["not_allowed"]: "permission denied: this key's role may not use the endpoint",
    EXIT_CODES["internal"]: "a defect of hisparse, or a child of hisparse up that restarts did not keep running",
    EXIT_PEER_LOST: "a worker has lost a peer of its group, and is not to blame",
    EXIT_INTERRUPTED: "interrupted",
}


class RootGroup(click.Group):
    """A group that reports any error in one line on stderr and exits with its code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # by topic, as added, not by name

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        _point_to_common_options(cmd)
        super().add_command(cmd, name)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Options of every command, before or after its name"):
            formatter.write_dl(common_option_lines())

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does. Raises UsageError for common options before a command that takes none."""
        name, command, rest = super().resolve_command(ctx, args)
        given = [option.opts[0] for option in self.params if option.name in COMMON and ctx.params.get(option.name)]
        if given and command is not None and not _takes_common_options(command):
            raise click.UsageError(f"{name} takes no {' or '.join(given)}", ctx)
        return name, command, rest

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        """As click's. With `standalone_mode` off, errors are raised."""
        try:
            _replace_unprintable()
            check_packages()
            result = super().main(args, standalone_mode=False, **extra)
            sys.stdout.flush()
        except BaseException as error:
            if not standalone_mode:
                raise
            fail(error)
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


def _replace_unprintable() -> None:
    """Let stdout take text of any language: what its encoding lacks becomes a question mark."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def fail(error: BaseException) -> NoReturn:
    """Exit with the code of `error`. An error of another class than those below is a defect and shows its traceback."""
    if isinstance(error, NameClash):  # `protocol` may be another package
        _complain(str(error))
        sys.exit(EXIT_CODES["config"])
    from protocol.errors import HiSparseError
    from protocol.start_and_end import leave_reason

    error = _innermost(error)
    match error:
        case HiSparseError():
            leave_reason(error)
            _complain(str(error))
            sys.exit(exit_code(error))
        case click.exceptions.NoArgsIsHelpError():
            click.echo(error.format_message())
            sys.exit(0)
        case click.exceptions.Exit():
            sys.exit(error.exit_code)
        case click.ClickException():
            _complain(_in_plain_words(error.format_message()) + _usage_hint(error))
            sys.exit(error.exit_code)
        case KeyboardInterrupt() | click.Abort():
            sys.exit(EXIT_INTERRUPTED)
        case BrokenPipeError():  # the reader of stdout has gone, e.g. `hisparse requests | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_FAILED)
        case SystemExit():
            raise error
    leave_reason(error)
    traceback.print_exception(error)
    sys.exit(EXIT_CODES["internal"])


def exit_code(error: HiSparseError) -> int:
    return EXIT_CODES.get(error.code, EXIT_CODES["internal"])


def _complain(text: str) -> None:
    click.echo(f"hisparse: {' '.join(text.split())}", err=True)


def _in_plain_words(text: str) -> str:
    """click's text without the names of its types."""
    for theirs, ours in CLICK_TYPES.items():
        text = text.replace(f"is not a valid {theirs}", f"is not {ours}")
    return text


def _usage_hint(error: click.ClickException) -> str:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f" (see {error.ctx.command_path} --help)"
    return ""


def _innermost(error: BaseException) -> BaseException:
    """What a group that left a nursery comes down to: an interruption if there is one, else its only member."""
    if isinstance(error, BaseExceptionGroup):
        if error.subgroup(KeyboardInterrupt) is not None:
            return KeyboardInterrupt()
        if len(error.exceptions) == 1:
            return _innermost(error.exceptions[0])
    return error


# ---------------------------------------------------------------- settings


class Setting(NamedTuple):
    """A flag that overrides one setting: `--seats` for worker.seats, or `alias`. Its help is the setting's meaning."""

    name: str
    alias: str = ""
    is_flag: bool = False

    @property
    def flag(self) -> str:
        return self.alias or f"--{self.name.partition('.')[2].replace('_', '-')}"

    @property
    def parameter(self) -> str:
        return "setting_" + self.name.replace(".", "_")


EVERYWHERE: Final = (
    Setting("cluster.runtime_dir"),
    Setting("cluster.keys_dir"),
    Setting("cluster.insecure", is_flag=True),
    Setting("cluster.speak_as", "--as"),
)
CONFIG_HELP: Final = "TOML file; default $HISPARSE_CONFIG."
ASSIGNMENT: Final = "SECTION.FIELD=VALUE"
ASSIGNMENT_HELP: Final = "Any setting; repeatable. A setting's flag, where it has one, takes precedence."
#: Names of the parameters of the options of every command.
COMMON: Final = ("config_path", "assignments", *(setting.parameter for setting in EVERYWHERE))
#: Stands below the help of each command that takes the common options.
COMMON_HINT: Final = "Options of every command, such as --runtime-dir and --config: hisparse --help"


def common_option_lines() -> list[tuple[str, str]]:
    """The options that `with_config` gives to every command, each with its help."""
    lines = [("--config FILE", CONFIG_HELP), (f"--set {ASSIGNMENT}", ASSIGNMENT_HELP)]
    return lines + [(it.flag if it.is_flag else f"{it.flag} VALUE", meanings()[it.name]) for it in EVERYWHERE]


def common_options() -> list[click.Parameter]:
    """The options of every command, for `hisparse` itself: they may stand before the name of a command."""
    return click.command()(_with_common_options(lambda: None)).params


def _with_common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(EVERYWHERE):
        command = _setting_option(setting, hidden=True)(command)
    command = click.option(
        "--set",
        "assignments",
        multiple=True,
        callback=_assignments,
        metavar=ASSIGNMENT,
        help=ASSIGNMENT_HELP,
        hidden=True,
    )(command)
    return click.option("--config", "config_path", metavar="FILE", help=CONFIG_HELP, hidden=True)(command)


def _takes_common_options(command: click.Command) -> bool:
    """Return whether `command`, or one below it, has a common option."""
    if isinstance(command, click.Group):
        return any(map(_takes_common_options, command.commands.values()))
    return any(parameter.name in COMMON for parameter in command.params)


def _point_to_common_options(command: click.Command) -> None:
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _point_to_common_options(inner)
    elif _takes_common_options(command):
        command.epilog = COMMON_HINT


def with_config(
    *settings: Setting, origins: bool = False, implied: Mapping[str, Mapping[str, str]] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command `--config`, `--runtime-dir`, `--set` and a flag per setting; it receives the resolved `config`.

    With `origins` it also receives where each setting comes from, by "section.field". `implied`: by the name of another
    option of the command, settings that hold where that option is given.
    """
    chosen = (*EVERYWHERE, *settings)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, config_path: str | None, assignments: Sequence[tuple[str, str]], **kwargs: Any) -> Any:
            before = click.get_current_context().find_root().params  # the command's name
            given = {setting.name: kwargs.pop(setting.parameter) for setting in chosen}
            in_front = {setting.name: before.get(setting.parameter) for setting in EVERYWHERE}
            given |= {name: value for name, value in in_front.items() if given[name] is None}
            flags = dict((*before.get("assignments", ()), *assignments))
            flags |= {name: value for name, value in given.items() if value is not None}
            for option, values in (implied or {}).items():
                flags |= values if kwargs[option] is not None else {}
            from protocol.config import load_with_origins

            config, found = load_with_origins(config_path or before.get("config_path"), flags=flags)
            return function(*args, config=config, **({"origins": found} if origins else {}), **kwargs)

        command: Callable[..., Any] = wrapper
        for setting in reversed(settings):
            command = _setting_option(setting, hidden=False)(command)
        return _with_common_options(command)

    return decorate


class SettingOption(click.Option):
    """An option whose help is looked up when it is shown."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        section, _, field = str(self.name).removeprefix("setting_").partition("_")
        self.help = meanings()[f"{section}.{field}"]
        return super().get_help_record(ctx)


def _setting_option(setting: Setting, *, hidden: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    shape = {"is_flag": True, "default": None} if setting.is_flag else {"metavar": "VALUE"}
    return click.option(setting.flag, setting.parameter, cls=SettingOption, hidden=hidden, **shape)


def _assignments(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r} is not SECTION.FIELD=VALUE", ctx=context, param=parameter)
    return tuple((name, text) for name, _, text in (value.partition("=") for value in values))


def load_config(path: str | None, flags: dict[str, object]) -> Config:
    from protocol.config import load

    return load(path, flags=flags)


def read_words(values: Sequence[str]) -> Iterator[str]:
    """Arguments split at commas and blanks: `1,2 3`."""
    for value in values:
        yield from value.replace(",", " ").split()


class TokenCount(click.ParamType[int]):
    """A number of tokens, at least 1: 131072, or 128k (of 1,024), or 1m."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip().lower()
        unit = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:], 1)
        digits = text[:-1] if unit > 1 else text
        if not (
            digits.isdecimal()
            and digits.isascii()
            and len(digits) < TOKEN_DIGITS_MAX
            and 0 < int(digits) * unit <= TOKENS_MAX
        ):
            self.fail(f"{value!r} is no number of tokens from 1 to {TOKENS_MAX}, as in 131072 or 128k", param, ctx)
        return int(digits) * unit


@contextlib.contextmanager
def named_by_flags(flags: Mapping[str, str], typed: Mapping[str, object]) -> Iterator[None]:
    """Errors of the block that name a setting in `flags` name its flag in place of it, with the value in `typed`."""
    from protocol.errors import HiSparseError

    try:
        yield
    except HiSparseError as error:
        if error.field in flags:
            error.field = flags[error.field]
            error.value = str(typed.get(error.field, error.value))
        for setting, flag in flags.items():
            if "." in setting:  # others are ordinary words
                error.remedy = error.remedy.replace(setting, flag)
        raise


def deadline_option(default_s: float, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--deadline SECONDS`, with `text` as its help."""
    return click.option(
        "--deadline", default=default_s, show_default=True, type=click.FloatRange(0), metavar="SECONDS", help=text
    )


def output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`-o FORMAT`, and `--json` as a short form of `-o json`."""
    command = click.option("--json", "output", flag_value="json", help="The same as -o json.")(command)
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "jsonl"]),
        default="table",
        show_default=True,
        help="Output format.",
    )(command)


def show_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Callback of `--version`; reads the distribution's metadata only when it is used."""
    if not asked:
        return
    from protocol.version import our_version

    click.echo(our_version())
    context.exit()
