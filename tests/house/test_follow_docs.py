"""Every block of README and docs says by a mark how it is followed; the follower reads them as it says."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tools.docs.follow import DOCUMENTS, WrongMark, blocks_of, commands_of, server_of

TEXT = {document: (ROOT / document).read_text() for document in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_block_is_marked(document: str) -> None:
    for block in blocks_of(document, TEXT[document]):
        if block.kind == "shows":
            commands = [line for line in block.lines if re.match(r"(\$ )?(hisparse|make|pip|curl|docker) \S", line)]
            assert commands == [], f"{block.place}: commands that are only shown"


def test_no_block_escapes_the_parser() -> None:
    """Fences by their count, and each command of the documents that begins a line."""
    for document, text in TEXT.items():
        blocks = blocks_of(document, text)
        fenced = sum(text.splitlines()[block.line - 1].startswith("```") for block in blocks)
        assert 2 * fenced == len(re.findall(r"^```", text, re.MULTILINE))
        followed = "\n".join(line for block in blocks for line in block.lines)
        for command in re.findall(r"^(?:    |\$ )?((?:hisparse|make|docker compose) .*)", text, re.MULTILINE):
            assert command.strip() in followed, f"{document}: {command}"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("```\nmake demo\n```", "x.md:1: a block needs a mark"),
        ("text\n\n    make demo\n", "x.md:3: a block needs a mark"),
        ("<!-- run -->\nbetween\n```\nmake demo\n```", "x.md:3: a block needs a mark"),
        ("<!-- run: needs luck -->\n```\nmake demo\n```", "unknown word in a mark: 'needs luck'"),
        ("<!-- run: with luck -->\n```\nmake demo\n```", "unknown word in a mark: 'with luck'"),
        ("<!-- shows a picture -->\n```\nmake demo\n```", "unknown word in a mark: 'a picture'"),
        ("<!-- run -->\n```\na\n```\n```\nb\n```", "x.md:5: a block needs a mark"),
    ],
)
def test_block_that_would_be_skipped_in_silence_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(WrongMark, match=re.escape(refusal)):
        blocks_of("x.md", text)


def test_marks_and_lines_are_read() -> None:
    mark = "<!-- run: needs a GPU, takes 6 minutes -->"
    text = f"{mark}\n\n    one \\\n        two   # why\n    # a remark\n\n    three\n\nend\n"
    (block,) = blocks_of("x.md", text)
    assert (block.place, block.needs, block.about) == ("x.md:3", ("a GPU",), ("needs a GPU", "takes 6 minutes"))
    assert commands_of(block.lines) == [("one      two   # why", ""), ("three", "")]
    assert commands_of(["$ size 1", "2 3", "4", "$ size 2"]) == [("size 1", "2 3\n4\n"), ("size 2", "")]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("hisparse up -n 2", "up"),
        ("HISPARSE_HTTP_PORT=1 hisparse http  # why", "http"),
        ("hisparse workers", ""),
        ("curl localhost", ""),
        ("(umask 077; true)", ""),
    ],
)
def test_servers_are_known(command: str, kind: str) -> None:
    assert server_of(command) == kind
