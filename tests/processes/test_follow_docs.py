"""README and some documents, followed literally on a fresh clone. `make follow-docs` follows all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.follow_docs import follow_all

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
FOLLOWED = ("README.md", "docs/api.md", "docs/operations.md", "docs/runbook.md", "docs/security.md")


@pytest.mark.guide
def test_commands_and_programs_of_the_documents_run(tmp_path: Path) -> None:
    outcomes = follow_all(tmp_path, FOLLOWED, is_long=False, is_install=False)
    assert [str(it) for it in outcomes if it.state == "failed"] == []
    assert {it.place.partition(":")[0] for it in outcomes if it.state == "ok"} == set(FOLLOWED)
    assert all(it.detail.startswith(("needs ", "takes ")) for it in outcomes if it.state == "skipped")


def test_command_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is output that is not the one shown."""
    from tests.support import follow_docs

    blocks = {"run": "\n$ echo a\nb", "run ": "\nfalse\ntrue", "shows settings": "toml\nx = 1"}
    text = "\n\n".join(f"<!-- {mark.strip()} -->\n```{block}\n```" for mark, block in blocks.items())
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "x.md").write_text(text)
    monkeypatch.setattr(follow_docs, "make_clone", lambda _: clone)
    monkeypatch.setattr(follow_docs, "COMMAND_LIMIT_S", 60.0)
    outcomes = follow_all(tmp_path, ["x.md"], is_long=False, is_install=False)
    assert [(it.command, it.state) for it in outcomes] == [
        ("echo a", "failed"),
        ("false", "failed"),
        ("hisparse config show --config FILE", "failed"),
    ]
    assert outcomes[0].detail == "printed ['a'], not ['b']"
