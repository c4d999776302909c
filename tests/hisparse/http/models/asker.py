"""Bodies as the front reads them, and the grammars that are checked for them in its processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from hisparse.http.apis.asks import Ask, ask_of
from hisparse.http.apis.body import ApiBody, read_body
from hisparse.http.models.grammar_checks import GrammarChecks
from protocol.errors import BadInput
from tests.hisparse.http.test_bodies_and_answers import here, served
from tests.support.tiny_templates import TEMPLATES


@dataclass
class Asker:
    """`asker(ChatBody, messages=[...])` is what is asked of a worker for that body."""

    checks: GrammarChecks

    def __call__(self, kind: type[ApiBody], template: str = "glm-5", **body: Any) -> Ask:
        """Raises BadInput."""
        generation = read_body(json.dumps(body).encode(), kind).generation()  # type: ignore[attr-defined]
        known = served(TEMPLATES[template])
        made = ask_of(generation, known, "a", here)
        return made.held_to(self.checks.check(made.form, known.model, known.tokenizer)) if made.form else made

    def refused(self, kind: type[ApiBody], template: str = "glm-5", **body: Any) -> BadInput:
        with pytest.raises(BadInput) as caught:
            self(kind, template, **body)
        return caught.value


@contextmanager
def asker() -> Iterator[Asker]:
    checks = GrammarChecks()
    yield Asker(checks)
    checks.close()
