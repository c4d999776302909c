"""docs/first-hour.txt is what a person sees: the same script on real processes gives the same text."""

from __future__ import annotations

import shutil

import pytest

from tools.docs.first_hour import SCENES, TRANSCRIPT, record, screens, transcript

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (shutil.which("script") and shutil.which("curl")), reason="no script(1) or curl"),
]


def sections(text: str) -> dict[str, str]:
    """By title."""
    parts = text.split("=" * 100 + "\n")[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_screens_are_those_of_the_transcript() -> None:
    """Tables and top at 80, 100 and 120 columns: no line is wider, no number is cut."""
    known = sections(TRANSCRIPT.read_text())
    for title, lines in screens():
        assert known[title].strip("\n").splitlines()[3:] == "\n".join(lines).rstrip("\n").splitlines(), title
        width = int(title.split()[-2])
        assert max(map(len, lines)) <= width
        assert "1204/4096" in "\n".join(lines)


@pytest.mark.guide
@pytest.mark.deep
def test_a_first_hour_shows_what_the_transcript_says() -> None:
    """`python -m tools.docs.first_hour` writes it anew."""
    shown = sections(transcript(record().items()))
    known = sections(TRANSCRIPT.read_text())
    assert shown.keys() == {scene.title for scene in SCENES}
    for title, text in shown.items():
        assert text.rstrip("\n") == known[title].rstrip("\n"), title
