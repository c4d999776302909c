"""Chat templates as the transformers library renders them, and those that cannot be compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from protocol.chat_templates import compiled
from protocol.errors import ConfigError
from protocol.tokenizer_files import read_tokenizer

MESSAGES: Final[list[dict[str, Any]]] = [{"role": "user", "content": "<a>"}, {"role": "assistant", "content": "b\n"}]

#: With `generation` where templates have it: around turns, in loops and macros, beside blanks and line ends.
TEMPLATES: Final = {
    "around a turn": (
        "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{% generation %}\n{{ m.content }}</s>\n"
        "{% endgeneration %}\n{% else %}\n{{ m.content }}\n{% endif %}\n{% endfor %}\n"
    ),
    "trimmed": "a {%- generation -%} b {%- endgeneration %} c",
    "indented": "x\n    {% generation %}\n  y\n    {% endgeneration %}\nz",
    "in a loop": "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
    "loop in it": "{% generation %}{% for m in messages %}{{ loop.last }}{% endfor %}{% endgeneration %}",
    "names set in it": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "namespace": "{% set n = namespace(a=1) %}{% generation %}{% set n.a = 2 %}{% endgeneration %}{{ n.a }}",
    "within another": "{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}",
    "in a macro": "{% macro f(x) %}{% generation %}[{{ x }}]{% endgeneration %}{% endmacro %}{{ f('<b>') }}",
    "no escapes": "{% generation %}{{ messages | tojson }}{{ messages[0].content | trim }}{% endgeneration %}",
    "empty": "{% generation %}{% endgeneration %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_is_rendered_as_by_the_library(name: str) -> None:
    (text,), _ = render_jinja_template([MESSAGES], chat_template=TEMPLATES[name])
    assert compiled(TEMPLATES[name]).render(messages=MESSAGES) == text


#: Templates that cannot be compiled, and what is said of them.
FAULTY: Final = {
    "unknown tag": ("a\n{% unknown %}", "line 2: Encountered unknown tag 'unknown'"),
    "unknown filter": ("a\n\n{{ x | nofilter }}", "line 3: No filter named 'nofilter'"),
    "not ended": ("{% generation %}x", "line 1: Unexpected end of template"),
    "ended twice": ("{% generation %}{% endgeneration %}\n{% endgeneration %}", "line 2: Encountered unknown tag"),
    "break outside of a loop": ("{% break %}", "'break' outside loop"),
    "nested too deeply": ("{{ " + "(" * 3_000 + ")" * 3_000 + " }}", "maximum recursion depth exceeded"),
}


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("name", FAULTY)
@pytest.mark.refuses("the chat template cannot be compiled: {}")
def test_faulty_template_is_refused_where_the_checkpoint_is_read(tmp_path: Path, name: str, where: str) -> None:
    """By its file and line, which is that of the file though special tokens are bound before it."""
    template, text = FAULTY[name]
    settings: dict[str, Any] = {"bos_token": "<bos>"}
    if where == "tokenizer_config.json":
        settings["chat_template"] = template
    else:
        (tmp_path / where).write_text(template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError) as caught:
        read_tokenizer(tmp_path)
    assert (caught.value.field, caught.value.value) == ("worker.model", str(tmp_path / where))
    assert f"the chat template cannot be compiled: {text}" in caught.value.message
