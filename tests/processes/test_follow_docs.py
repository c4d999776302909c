"""README and some documents, followed literally on a fresh clone. `make follow-docs` follows all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs.follow import follow_all

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
FOLLOWED = ("README.md", "docs/api.md", "docs/operations.md", "docs/runbook.md", "docs/security.md")


@pytest.mark.guide
@pytest.mark.deep
def test_commands_and_programs_of_the_documents_run(tmp_path: Path) -> None:
    outcomes = follow_all(tmp_path, FOLLOWED, is_long=False, is_install=False)
    assert [str(it) for it in outcomes if it.state == "failed"] == []
    assert {it.place.partition(":")[0] for it in outcomes if it.state == "ok"} == set(FOLLOWED)
    assert all(it.detail.startswith(("needs ", "takes ")) for it in outcomes if it.state == "skipped")


def test_block_without_what_it_is_given_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the documents behind it are followed. The command that makes a checkpoint ends with an error here."""
    from tools.docs import follow

    (tmp_path / "clone").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hisparse").symlink_to("/bin/false")
    (tmp_path / "x.md").write_text(
        "<!-- run: with a tiny checkpoint -->\n```\ntrue\n```\n\n<!-- run -->\n```\ntrue\n```\n"
    )
    follower = follow.Follower(tmp_path, tmp_path / "clone", tmp_path / "bin")
    for block in follow.blocks_of("x.md", (tmp_path / "x.md").read_text()):
        follower.follow(block)
    assert [(it.place, it.state) for it in follower.outcomes] == [("x.md:2", "failed"), ("x.md:7", "ok")]
    assert follower.outcomes[0].detail.startswith("lacks a tiny checkpoint: exit code 1")


def test_installation_may_take_longer_than_another_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.docs import follow

    monkeypatch.setattr(follow, "COMMAND_LIMIT_S", 0.2)
    monkeypatch.setattr(follow, "LONG_LIMIT_S", 60.0)
    (tmp_path / "clone").mkdir()
    follower = follow.Follower(tmp_path, tmp_path / "clone", tmp_path, is_install=True)
    for mark in ("run: needs an empty environment", "run"):
        for block in follow.blocks_of("x.md", f"<!-- {mark} -->\n```\nsleep 1\n```\n"):
            follower.follow(block)
    assert [it.state for it in follower.outcomes] == ["ok", "failed"]
    assert follower.outcomes[1].detail == "not ended after 0.2 s"


def test_command_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is output that is not the one shown."""
    from tools.docs import follow

    kept = tmp_path / "run" / "hisparse" / "journal.sqlite"
    kept.parent.mkdir(parents=True)
    kept.touch()
    blocks = {"run": "\n$ echo a\nb", "run ": "\nfalse\ntrue", "shows settings": "toml\nx = 1"}
    text = "\n\n".join(f"<!-- {mark.strip()} -->\n```{block}\n```" for mark, block in blocks.items())
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "x.md").write_text(text)
    monkeypatch.setattr(follow, "make_clone", lambda _: clone)
    monkeypatch.setattr(follow, "COMMAND_LIMIT_S", 60.0)
    outcomes = follow_all(tmp_path, ["x.md"], is_long=False, is_install=False)
    assert [(it.command, it.state) for it in outcomes] == [
        ("echo a", "failed"),
        ("false", "failed"),
        ("hisparse config show --config FILE", "failed"),
    ]
    assert outcomes[0].detail == "printed ['a'], not ['b']"
    assert not kept.exists(), "the next document begins without it"
