"""The `hisparse` command.

Import rule: at its top a command module imports only click, the standard library, `hisparse.console.options` and the
table of model families; other modules (msgspec, trio, zmq, rich, torch) are imported inside the function that needs
them. So `hisparse --help` stays under 150 ms, and a command imports only what it uses. A test checks `sys.modules`.

Exit codes are stable; scripts may rely on them (`hisparse.console.options.EXIT_CODES`).
"""

from __future__ import annotations

import click

from hisparse.cli import (
    completion,
    config,
    demo,
    journal,
    kernels,
    keys,
    manifests,
    model,
    prefix,
    reload,
    requests,
    serve,
    size,
    submit,
    top,
    workers,
)
from hisparse.console.options import EXIT_MEANINGS, RootGroup, common_options, show_version


def _root() -> RootGroup:
    root = RootGroup(
        name="hisparse",
        help="Long-context sparse-attention decode with the KV cache in host memory.",
        epilog="\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in EXIT_MEANINGS.items()),
        params=[
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=show_version,
                help="Show the version.",
            ),
            *common_options(),
        ],
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    for command in (
        *(
            serve.up,
            serve.down,
            serve.coordinator,
            serve.worker,
            serve.http,
            demo.demo,
            model.model,
            size.size,
            manifests.manifests,
            kernels.kernels,
        ),
        *(submit.submit, submit.attach),
        *(requests.requests, requests.request, requests.abort, requests.retract, requests.resume, requests.resize),
        *(top.top, workers.workers, workers.pool, workers.drain, workers.undrain, workers.audit),
        *(workers.release_quarantine, workers.forget, workers.stop, prefix.prefix, journal.journal, keys.keys),
        reload.reload,
        *(config.config, completion.completion),
    ):
        root.add_command(command)
    return root


main = _root()

__all__ = ["main"]
