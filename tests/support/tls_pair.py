"""A certificate and its key, for tests of TLS."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

#: Names a directory with the two files, for machines that have no `openssl`.
GIVEN: Final = "FUZZ_TLS_PAIR"


def write_pair(place: Path, name: str = "front") -> tuple[str, str]:
    """A self-signed certificate for localhost, and its key, in `place`."""
    cert, key = place / f"{name}.pem", place / f"{name}.key"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command = ["openssl", "req", "-x509", *curve, "-keyout", str(key), "-out", str(cert), *subject]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return str(cert), str(key)


def pair_in(place: Path) -> tuple[str, str]:
    """A certificate and its key in `place`: those of the directory that GIVEN names, or new ones."""
    given = os.environ.get(GIVEN)
    if not given:
        return write_pair(place)
    for name in ("front.pem", "front.key"):
        shutil.copyfile(Path(given) / name, place / name)
        (place / name).chmod(0o600)
    return str(place / "front.pem"), str(place / "front.key")
