"""`hisparse manifests`: what runs a cluster on Kubernetes."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="Print manifests for Kubernetes.")
@click.option(
    "--values",
    "path",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Values, TOML: docs/kubernetes.md lists them.",
)
def manifests(path: Path) -> None:
    """Print the objects of a cluster on Kubernetes as YAML, for `kubectl apply -f -`.

    They name the Secrets that hold keys and contain none, so that they can be kept in a repository.
    """
    import metrics
    from hisparse.console.output import write_line
    from hisparse.manifests import documents, read_values
    from hisparse.manifests import manifests as all_manifests
    from protocol.small_files import read_small_file

    data, _ = read_small_file(path, "--values")
    values = read_values(data.decode(errors="replace"), str(path))
    shipped = Path(metrics.__file__).parent
    rules = (shipped / "rules" / "hisparse.yml").read_text()
    dashboards = {file.name: file.read_text() for file in sorted((shipped / "dashboards").glob("*.json"))}
    write_line(documents(all_manifests(values, rules, dashboards)).removesuffix("\n"))
