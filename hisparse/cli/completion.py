"""`hisparse completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

from typing import Final

import click

SHELLS: Final = ("bash", "zsh", "fish")
#: The variable through which the script asks `hisparse` for completions; click derives it from the program's name.
VARIABLE: Final = "_HISPARSE_COMPLETE"


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the script that completes `hisparse` in SHELL.

    \b
    bash:  eval "$(hisparse completion bash)"             in ~/.bashrc
    zsh:   eval "$(hisparse completion zsh)"              in ~/.zshrc
    fish:  hisparse completion fish > ~/.config/fish/completions/hisparse.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(context.find_root().command, {}, "hisparse", VARIABLE).source())
    return 0
