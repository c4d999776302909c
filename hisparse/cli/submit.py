"""Commands that stream outputs: submit a prompt, attach to a request."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from hisparse.console.options import output_option, read_words, with_config
from protocol.units import SEAT_ROWS_MAX

if TYPE_CHECKING:
    from hisparse.cli.streaming import Follow
    from protocol.settings import Config


#: Bits of a seed that is drawn.
SEED_BITS: Final = 63

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Leave with exit code 6 when the request has not ended by then; the request goes on.",
)


@click.command(short_help="Complete a prompt and stream the text.")
@click.argument("prompt", required=False)
@click.option("-f", "--file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Prompt from a file.")
@click.option(
    "--max-tokens", default=256, show_default=True, type=click.IntRange(1, 2**31 - 1), help="New tokens at most."
)
@click.option("--temperature", default=1.0, show_default=True, type=click.FloatRange(0), help="0 is greedy.")
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Draw from the smallest set of this probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    help="The same seed, the same numbers; default: drawn, another each time.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable.")
@click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    metavar="N",
    help="Log-probabilities of each token and of the N likeliest, 20 at most; with -o json or jsonl.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option("--priority", default=0, show_default=True, type=click.IntRange(-1_000, 1_000), help="Higher goes first.")
@click.option(
    "--prefill-mode",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "staged", "direct"]),
    help="staged: by the worker that decodes the request. direct: by another one, into its host pages.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(0, SEAT_ROWS_MAX - 1),
    metavar="N",
    help=f"Draft N tokens for a step at most, 0 to {SEAT_ROWS_MAX - 1}; default: as many as the worker drafts.",
)
@click.option("--id", "request_id", default="", metavar="ID", help="Id of the request; default: made by the service.")
@click.option("--tokens", "raw", is_flag=True, help="Prompt and output are token ids, separated by blanks or commas.")
@click.option("--detach", is_flag=True, help="Print the request's id and exit.")
@timeout_option
@output_option
@with_config()
def submit(
    config: Config,
    prompt: str | None,
    file: Path | None,
    output: str,
    request_id: str,
    priority: int,
    prefill_mode: str,
    draft_tokens: int | None,
    raw: bool,
    detach: bool,
    timeout_s: float | None,
    seed: int | None,
    **sampling: Any,
) -> int:
    """Complete PROMPT (or --file, or stdin) and stream the text.

    Sampling is that of the HTTP API where no option says otherwise. Ctrl-C leaves the request running; `hisparse
    attach` shows the rest, `hisparse abort` ends it. On a terminal, stderr says after 2 s what the request waits for,
    and at the end its id, tokens and hit rate.
    """
    from hisparse.cli.streaming import submit_and_follow
    from protocol.messages import DRAFT_TOKENS_MAX, Sampling

    if sampling["logprobs"] is not None and output == "table":
        raise click.UsageError("--logprobs needs -o json or -o jsonl", click.get_current_context())
    if sampling["logprobs"] is None:
        del sampling["logprobs"]
    text = _prompt_text(prompt, file)
    return submit_and_follow(
        _follow(config, output, timeout_s, raw=raw),
        [_token(word) for word in read_words([text])] if raw else text,
        Sampling(seed=secrets.randbits(SEED_BITS) if seed is None else seed, **sampling),
        request_id=request_id,
        priority=priority,
        prefill_mode=prefill_mode,
        draft_tokens=DRAFT_TOKENS_MAX if draft_tokens is None else draft_tokens,
        detach=detach,
    )


@click.command(short_help="Stream the output of a request.")
@click.argument("request_id", metavar="ID")
@click.option(
    "--from",
    "offset",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="First new token to show.",
)
@click.option("--tokens", "raw", is_flag=True, help="Show token ids.")
@timeout_option
@output_option
@with_config()
def attach(config: Config, request_id: str, offset: int, raw: bool, timeout_s: float | None, output: str) -> int:
    """Stream the output of a request that runs or has lately ended."""
    from hisparse.cli.streaming import attach_and_follow

    return attach_and_follow(_follow(config, output, timeout_s, raw=raw), request_id, offset)


def _follow(config: Config, output: str, timeout_s: float | None, *, raw: bool) -> Follow:
    from hisparse.cli.streaming import Follow
    from hisparse.console.session import endpoint_for

    role, endpoint, key = endpoint_for(config, "client")
    tells = sys.stderr.isatty()
    return Follow(
        endpoint,
        output,
        raw=raw,
        role=role,
        key=key,
        timeout_s=timeout_s,
        tells_waits=tells,
        tells_end=tells and sys.stdout.isatty(),
    )


def _prompt_text(prompt: str | None, file: Path | None) -> str:
    if prompt not in (None, "-") and file is not None:
        raise click.UsageError("give a prompt or --file, not both", click.get_current_context())
    if file is not None:
        return _decoded(file.read_bytes(), str(file))
    if prompt not in (None, "-"):
        return _decoded(os.fsencode(str(prompt)), "argument")
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give an argument, --file or stdin", click.get_current_context())
    return _decoded(sys.stdin.buffer.read(), "stdin")


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        from protocol.errors import BadInput

        remedy = "prompt with text, or with token ids by --tokens"
        raise BadInput(f"not UTF-8 text: {error.reason}", field="prompt", value=source, remedy=remedy) from error


def _token(word: str) -> int:
    if not word.isdecimal():
        raise click.BadParameter(f"{word!r} is not a token id", param_hint="PROMPT")
    return int(word)
