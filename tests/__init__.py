"""The tests. Rigs and fakes are in tests.support."""

from pathlib import Path
from typing import Final

#: The repository.
ROOT: Final = Path(__file__).resolve().parents[1]
