"""`hisparse demo`: see hisparse/demo."""

from __future__ import annotations

from pathlib import Path

import click

from hisparse.console.options import EXIT_FAILED
from worker.families.table import family_named, names


def _range(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    low, _, high = value.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise click.BadParameter(f"{value!r} is not MIN:MAX", ctx=context, param=parameter)
    return int(low), int(high)


@click.command(short_help="Serve, move requests, check every token.")
@click.option("--family", type=click.Choice(names()), default="glm-5", show_default=True, help="Model code.")
@click.option(
    "--prompts",
    multiple=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH",
    help="Text files or directories for the prompts; default: the source files of hisparse. Repeatable.",
)
@click.option("--requests", default=8, show_default=True, type=click.IntRange(2), help="Concurrent requests.")
@click.option("--new-tokens", type=click.IntRange(1), help="New tokens per request; default: 128, on a GPU 512.")
@click.option(
    "--prompt-tokens",
    callback=_range,
    metavar="MIN:MAX",
    help="Prompt lengths, spread evenly; default: 2048:6000, more where a family selects more.",
)
@click.option(
    "--turns",
    default=1,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Above 1: conversations. Each turn begins with all that was said; one conversation is of an owner apart.",
)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(2), help="Worker processes.")
@click.option(
    "--group-size",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Workers that share one copy of the model, each with a part of its experts; on GPUs one for each.",
)
@click.option(
    "--draft-tokens",
    default=0,
    show_default=True,
    type=click.IntRange(0, 4),
    help="Tokens that workers draft for each step, by the checkpoint's draft layer.",
)
@click.option(
    "--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N; all workers share it, but for groups."
)
@click.option(
    "--streams",
    type=click.Choice(["inline", "simulated"]),
    help="simulated: copies are delayed and run in any order that the fences permit. Default: by the device.",
)
@click.option(
    "--weights",
    type=click.Choice(["float32", "fp8"]),
    default="float32",
    show_default=True,
    help="Weights of the checkpoint; fp8: in the layout of the published repositories.",
)
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory for checkpoint, sockets, host pool and logs; default: one that is removed at the end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def demo(
    family: str,
    prompts: tuple[Path, ...],
    requests: int,
    new_tokens: int | None,
    prompt_tokens: tuple[int, int] | None,
    turns: int,
    workers: int,
    group_size: int,
    draft_tokens: int,
    device: str,
    streams: str | None,
    weights: str,
    work_dir: Path | None,
    as_json: bool,
) -> int:
    """Serve long prompts from small hot buffers, move requests between workers, check every token.

    Real processes on this machine: a coordinator and workers decode a small random checkpoint of the real model code;
    one request is retracted and resumed, one worker drained with handover. With --turns, later turns must reuse what
    earlier ones have computed, and nothing of another owner. Then the model library's own generate()
    decodes the same prompts and every token is compared. Exit code 1 on a mismatch or a leak.
    """
    from hisparse.console.output import console, plain, write_json
    from hisparse.demo.plan import CPU_NEW_TOKENS, GPU_NEW_TOKENS, DemoOptions, default_prompt_tokens
    from hisparse.demo.run import run_demo

    known = family_named(family)
    topk = max(DemoOptions.topk, known.topk_least)
    prompt_tokens = prompt_tokens or default_prompt_tokens(topk)
    options = DemoOptions(
        family=family,
        topk=topk,
        hot_multiple=known.hot_multiple,
        requests=requests,
        workers=workers,
        group_size=group_size,
        new_tokens=new_tokens or (CPU_NEW_TOKENS if device == "cpu" else GPU_NEW_TOKENS),
        prompt_tokens_min=prompt_tokens[0],
        prompt_tokens_max=prompt_tokens[1],
        device=device,
        streams=streams or "",
        weights=weights,
        turns=turns,
        draft_tokens=draft_tokens,
    )
    report = run_demo(options, prompts, work_dir)
    if as_json:
        write_json(plain(report))
    else:
        from hisparse.demo.report import render

        console().print(render(report))
    return 0 if report.passed else EXIT_FAILED
