"""The documents say what the code says: commands, settings, bounds, metrics, fences, states, files, links, tests."""

from __future__ import annotations

import ast
import html
import json
import re
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from basics import token_bucket
from basics.request_states import POISON_STRIKES, State
from benchmarks.ratios import ratios
from coordinator.gateway import connections
from coordinator.journal import journal, store
from coordinator.listener import connection_tracker, rate_limiter, router, sweeper, unfinished, zap
from coordinator.service import CLIENT_UNREAD_MESSAGES
from coordinator.turn import dispatch
from hisparse.cli import main
from hisparse.cluster import restarts, supervision
from hisparse.demo import compare
from hisparse.http import answering, front, link, outputs
from hisparse.http.apis import asks, tools
from hisparse.http.apis import body as bodies
from hisparse.http.models import renderers
from hisparse.http.models.formats import scanning
from hisparse.http.server import api_keys, body_reader, connection, cors, exchange, identities, listener, wire
from hisparse.top import draw, sample
from metrics.names import BY_NAME
from protocol import messages
from protocol.config import OTHER_VARIABLES, SECTIONS, HostFacts, build
from protocol.settings import CoordinatorSettings, HttpSettings
from protocol.transport import watched
from tests import ROOT
from tools.docs.reference import pages
from worker.streams import FENCES
from worker.transfer import receiving, sending

DOCUMENTS = {path.name: path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
ARCHITECTURE = DOCUMENTS["architecture.md"]
PICTURES = sorted(path for room in ("docs", "benchmarks/results") for path in (ROOT / room).glob("*.svg"))
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def found(pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Of all documents, continued lines joined; by the document's name."""
    for name, text in DOCUMENTS.items():
        for match in re.finditer(pattern, text.replace("\\\n", " "), re.MULTILINE):
            yield name, match


def default_of(command: str, option: str) -> float:
    return next(float(it.default) for it in main.commands[command].params if option in it.opts)


# ---------------------------------------------------------------- prose


def test_prose_names_its_subjects() -> None:
    """Words that CONTRIBUTING's rule for prose bars, code spans and generated tables aside."""
    barred = r"(?i)\b(whoever|whatever|whom|(?:no|some|every|any)body|surely)\b"
    pages = DOCUMENTS | {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.md")}
    for name, text in pages.items():
        if name != "TABLES.md":
            prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
            assert re.findall(barred, prose) == [], name


def prose_of(path: Path) -> str:
    """Comments, docstrings and other texts of a Python file, with names of tests and of what they define as words."""
    found = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                found.append(token.string)
            elif token.type == tokenize.NAME:
                found.append(token.string.replace("_", " "))
    return "\n".join(found)


@pytest.mark.parametrize(
    "room", sorted({path.parent for top in ("tests", "tools") for path in (ROOT / top).rglob("*.py")})
)
def test_prose_of_tests_names_its_subjects(room: Path) -> None:
    """Docstrings, comments, messages and names; the files that list retired words aside."""
    barred = r"(?i)\b(whoever|whom|(?:no|some|every|any)body|everyone|someone|surely|he|him|his|she|hers)\b"
    for path in sorted(room.glob("*.py")):
        has_one = re.search(
            barred, path.read_text().replace("_", " ")
        )  # maybe in code; most files need no look at that
        if has_one and path.name not in ("test_docs.py", "test_glossary.py"):
            assert re.findall(barred, prose_of(path)) == [], path.relative_to(ROOT)


# ---------------------------------------------------------------- commands and settings


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` begin with, and the words behind it."""
    command: click.Command = main
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("name", pages())
def test_generated_page_is_what_the_code_says(name: str) -> None:
    assert DOCUMENTS[name] == pages()[name], "run: make docs"


def test_each_command_and_option_exists() -> None:
    commands = [
        (name, match[1].split()) for name, match in found(r"(?<!from )\bhisparse ([a-z][a-z-]*\b[^]`\n|#&;)]*)")
    ]
    assert len(commands) > 150
    for name, words in commands:
        command, rest = command_of(words)
        assert command is not main, f"{name}: hisparse {words[0]}"
        known = {spelt for it in command.params for spelt in (*it.opts, *it.secondary_opts)} | {"--help"}
        options = {word.strip("[],.:").partition("=")[0] for word in rest if word.startswith(("-", "[-"))} - {"-"}
        assert isinstance(command, click.Group) or options <= known, f"{name}: hisparse {' '.join(words)}"


def test_each_flag_in_prose_is_an_option() -> None:
    """`--deterministic` without a command: an option of one."""
    commands = [
        each for command in main.commands.values() for each in (command, *getattr(command, "commands", {}).values())
    ]
    known = {spelt for command in commands for it in command.params for spelt in (*it.opts, *it.secondary_opts)}
    ours = {name for name in DOCUMENTS if name not in ("CONTRIBUTING.md", "testing.md", "http.md", "performance.md")}
    flags = [(name, match[1]) for name, match in found(r"`(--[a-z][a-z-]+)[` =]") if name in ours]
    assert len(flags) > 30
    assert [(name, flag) for name, flag in flags if flag not in {*known, "--version", "--volumes"}] == []


def test_each_setting_exists() -> None:
    settings = list(found(r"`(worker|coordinator|cluster|http)\.([a-z_]+)`"))
    assert len(settings) > 50
    for name, match in settings:
        is_room = (ROOT / match[1] / match[2]).is_dir()  # `hisparse.client`
        assert is_room or match[2] in SECTIONS[match[1]].__struct_fields__, f"{name}: {match[0]}"
    for name, match in found(r"\bHISPARSE_[A-Z]+_[A-Z_]*[A-Z]\b"):
        section, _, field = match[0].removeprefix("HISPARSE_").lower().partition("_")
        is_setting = section in SECTIONS and field in SECTIONS[section].__struct_fields__
        assert is_setting or match[0] in OTHER_VARIABLES, f"{name}: {match[0]}"


def test_each_shown_configuration_file_is_accepted() -> None:
    shown = [match[1] for _, match in found(r"```toml\n((?:.*\n)*?)```")]
    shown += [match[1] for _, match in found(r"^(\[worker\]\nseats = .*\n(?:[a-z_]+ = .*\n)+)")]
    assert len(shown) >= 2
    for text in shown:
        build(tomllib.loads(text), {}, {}, HostFacts("host", 1, 1))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("http.md", f"lists of token ids ({bodies.PROMPTS_MAX} prompts at most)"),
        ("http.md", f"default {asks.COMPLETION_TOKENS_DEFAULT} for completions"),
        ("http.md", f"{asks.CHAT_TOKENS_DEFAULT} for chats"),
        ("http.md", f"up to {messages.STOP_STRINGS_MAX}, of {messages.STOP_CHARS_MAX} characters at most"),
        ("http.md", f"up to {bodies.N_MAX} samples; {bodies.CHOICES_MAX} over all prompts"),
        ("http.md", f"by a comment every {answering.KEEPALIVE_S:g} s"),
        ("http.md", f"`http.reattach_grace_s` ({HttpSettings().reattach_grace_s:g} s)"),
        ("http.md", f"`http.worker_wait_s` ({HttpSettings().worker_wait_s:g} s)"),
        ("http.md", f"past {link.RECONNECT_LIMIT_S:g} s they end with an error"),
        ("http.md", f"at least {api_keys.KEY_CHARS_MIN} characters each"),
        ("http.md", f"browsers remember it for {cors.PREFLIGHT_MAX_AGE_S} s"),
        ("http.md", f"`http.requests_max`, {HttpSettings().requests_max} |"),
        ("http.md", f"| {exchange.BODY_BYTES_MAX >> 20} MiB, within {exchange.BODY_LIMIT_S:g} s |"),
        ("http.md", f"all bodies that are being read | {exchange.BODIES_BYTES_MAX >> 20} MiB |"),
        ("http.md", f"a field that is no prompt | {bodies.FIELD_BYTES_MAX >> 10} KiB of JSON |"),
        ("http.md", f"| {renderers.RENDER_LIMIT_S:g} s, {renderers.MEMORY_BYTES_MAX >> 20} MiB, the bytes of a text |"),
        ("http.md", f"same time | {body_reader.READERS_MAX}, in threads; {body_reader.READERS_PER_KEY} of one key |"),
        ("http.md", f"has not answered | {outputs.SUBMITS_MAX}; {outputs.SUBMITS_PER_KEY} of one key |"),
        ("http.md", f"At most {front.LOOKS_PER_KEY / front.LOOK_S:g} a second for one key, "),
        ("http.md", f"{front.LOOKS_MAX / front.LOOK_S:g} in all; further ones wait"),
        ("http.md", f"the output's, {asks.ECHO_CHARS_MAX >> 20} MiB at most"),
        ("http.md", f"Limits: {tools.TOOLS_BYTES_MAX >> 20} MiB for `tools`, {tools.ARGUMENTS_BYTES_MAX >> 20} MiB"),
        ("http.md", f"names of {scanning.NAME_CHARS_MAX} letters, digits"),
        ("http.md", f"unread by a client | {connection.READ_LIMIT_S} s |"),
        ("http.md", f"an idle connection | `http.idle_s`, {HttpSettings().idle_s:g} s |"),
        ("http.md", f"`Keep-Alive: timeout={connection.told_idle_s(HttpSettings().idle_s)}`"),
        ("http.md", f"headers | {connection.HEADER_LIMIT_S} s, {wire.HEADER_BYTES_MAX >> 10} KiB |"),
        ("http.md", f"a TLS handshake | {connection.HEADER_LIMIT_S} s |"),
        ("http.md", f"printable ASCII of {identities.TRACE_ID_CHARS_MAX} characters at most"),
        (
            "http.md",
            f"| {listener.CONNECTIONS_PER_PLACE} for each answer at the same time, "
            f"{listener.CONNECTIONS_MIN:,} at least |",
        ),
        ("http.md", f"`ID.OWNER`, with {api_keys.OWNER_CHARS} digits"),
        ("http.md", f"after SIGTERM | {listener.STOP_DEADLINE_S:g} s for running answers"),
        ("security.md", f"{messages.CLIENT_MESSAGE_BYTES_MAX >> 20} MiB from clients"),
        ("security.md", f"{messages.WORKER_MESSAGE_BYTES_MAX >> 20} MiB from workers"),
        ("security.md", f"`coordinator.messages_per_s` ({CoordinatorSettings().messages_per_s:,.0f}, and"),
        ("security.md", f"and {token_bucket.BYTES_PER_TOKEN >> 10} KiB count as one more"),
        ("security.md", f"`messages_burst` ({CoordinatorSettings().messages_burst:,})"),
        ("security.md", f"after {rate_limiter.CUT_AFTER:,} more the connection is ended"),
        ("security.md", f"| {CLIENT_UNREAD_MESSAGES} per client connection |"),
        (
            "security.md",
            f"| {connections.OUTBOX_MESSAGES_MAX:,} or {connections.OUTBOX_BYTES_MAX >> 20} MiB per connection |",
        ),
        ("security.md", f"`coordinator.connections_max` ({CoordinatorSettings().connections_max:,})"),
        ("security.md", f"`connections_per_key_max` ({CoordinatorSettings().connections_per_key_max})"),
        ("security.md", f"| {connection_tracker.INTRODUCE_LIMIT_S:g} s, {connection_tracker.NEWCOMERS_MAX} at once |"),
        ("security.md", f"| {router.HANDSHAKE_LIMIT_MS / 1e3:g} s each; {zap.HANDSHAKES_PER_S:g} a second per key |"),
        ("security.md", f"keepalive, {NUMBERS[watched.KEEPALIVE_PROBES]} probes {watched.KEEPALIVE_S:g} s apart"),
        ("security.md", f"; {unfinished.UNFINISHED_LIMIT_S:g} s; while it lasts"),
        ("security.md", f"may grow by {unfinished.GROWTH_BYTES_MAX >> 20} MiB"),
        ("security.md", f"({unfinished.GROWTH_BYTES_MAX >> 21} MiB before the hello)"),
        ("security.md", f"within {1e3 * sweeper.GROWTH_INTERVAL_S:g} ms when the process has grown by"),
        ("security.md", f"come to {unfinished.SLACK_BYTES >> 10} KiB"),
        ("crash-safety.md", f"at least {1e3 * journal.INTERVAL_S:g} ms apart"),
        ("crash-safety.md", f"After {store.SUMMARY_BYTES >> 20} MiB"),
        ("crash-safety.md", f"a reserve of {store.RESERVE_BYTES >> 20} MiB"),
        ("crash-safety.md", f"every {journal.RETRY_S:g} s the group"),
        ("README.md", f"closer than {compare.TIE_BOUND:.0e}".replace("e-0", "e-")),
        ("architecture.md", f"{NUMBERS[POISON_STRIKES]} deaths of its worker"),
        ("architecture.md", f"until {NUMBERS[restarts.RESTARTS_MAX]} short lives in a row"),
        ("architecture.md", f"kills it after {NUMBERS[supervision.HUNG_LIMITS]} heartbeat limits"),
        ("prefill-decode.md", f"doubles from {dispatch.TRANSFER_PAUSE_S:g} s"),
        ("prefill-decode.md", f"sender silent for {receiving.STOP_LIMIT_S:g} s"),
        ("prefill-decode.md", f"is sent again, {NUMBERS[sending.ATTEMPTS_MAX]} times at most"),
        ("operations.md", f"needs {draw.WIDTH_MIN}x{draw.HEIGHT_MIN} cells"),
        ("operations.md", f"over the last {sample.WINDOW_S:g} s"),
        ("runbook.md", f"`--deadline`, {default_of('drain', '--deadline'):g} s"),
    ],
)
def test_each_documented_bound_matches_the_code(document: str, said: str) -> None:
    assert said in re.sub(r"\s+", " ", DOCUMENTS[document])


def test_each_metric_is_exported() -> None:
    """Whole names; docs/metrics.md is held equal in both directions by test_metrics.py."""
    named = [(name, re.sub(r"_(bucket|sum|count)$", "", match[0])) for name, match in found(r"\bhisparse_[a-z_]+\b")]
    assert len(named) > 100
    assert [it for it in named if it[1] not in BY_NAME and not it[1].endswith("_")] == []


def test_readme_quotes_measurements() -> None:
    said = re.sub(r"\s+", " ", DOCUMENTS["README.md"])
    short = {it["overlap"]: it["ratio"] for it in ratios(result("decode-beside-H200.json")) if it["context"] == 8_192}
    assert f"give {short[0.99]:.1f} times the tokens per second" in said
    assert f"with 99 % hits, and {short[0.8]:.1f} times with 80 %" in said
    ran = [row for row in result("serve-H200.json") if "not_run" not in row]
    cells = {(row["cell"], row["variant"], row["phase"]): row for row in ran}
    alone, beside = (cells["mix-16", "as is", phase] for phase in ("alone", "beside long prompts"))
    kept = 100 * beside["output_per_s"] / alone["output_per_s"]
    assert f"16 chats keep {kept:.0f} % of their tokens/s beside prompts of 128k" in said
    step_ms, slow_ms = 1e3 * alone["linked_worker_gap_s"]["p50"], 1e3 * beside["linked_worker_gap_s"]["p99"]
    assert (
        f"gaps between their tokens are below {slow_ms:.0f} ms, where a step without prompts takes {step_ms:.0f}"
        in said
    )
    hot, resident = (cells["32k8k-48", variant, ""]["linked_output_per_s"] for variant in ("as is", "all resident"))
    assert f"48 requests of 32k make {hot:.0f} tokens/s" in said
    assert f"and {resident:.0f} with all rows on the device" in said
    assert f"{cells['32k1-2', 'as is', '']['computed_per_s']:,.0f} tokens/s of prompts of 32k alone" in said
    waits_s, of_four_s = (cells[cell, "as is", ""]["ttft_s"]["p50"] for cell in ("agents-14", "agents-4"))
    assert f"14 agents of 75k to 100k wait {waits_s:.0f} s for a first token, 4 agents {of_four_s:.0f} s" in said


def test_shown_commands_fit_a_worker() -> None:
    """DeepSeek-V3.2 is neither in bfloat16 nor smaller than a GPU: eight share it."""
    shown = [(name, match[0]) for name, match in found(r".*(?:--model|MODEL_DIR)[ =][\w/.-]+.*")]
    assert len(shown) > 5
    assert [it for it in shown if ("V3.2" in it[1] or "GLM-5" in it[1]) and "--group-size 8" not in it[1]] == []


def result(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]
    return rows


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("pattern", [r"python -m ([a-z_.]+)", r"`([\w.-]+(?:/[\w.-]+)*/[\w.-]*\.(?:py|cuh|yml|md))`"])
def test_each_program_and_file_exists(pattern: str) -> None:
    named = [(name, match[1]) for name, match in found(pattern)]
    assert len(named) > 10
    for name, path in named:
        places = [ROOT / path, ROOT / "docs" / path]
        if pattern.startswith("python"):
            module = ROOT / path.rstrip(".").replace(".", "/")
            places = [module.with_suffix(".py"), module / "__main__.py"]
        assert any(place.exists() for place in places), f"{name}: {path}"


def test_each_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [(name, match[1]) for name, match in found(r"(?:`|^ *)make ([a-z-]+)")]
    assert len(named) > 5
    assert [(name, target) for name, target in named if target not in targets] == []


def test_map_names_every_folder() -> None:
    named = set(re.findall(r"`([\w/]+)/`", ARCHITECTURE))
    packages = [
        ROOT / name for name in ("protocol", "basics", "metrics", "kernels", "coordinator", "worker", "hisparse")
    ]
    folders = {str(path.parent.relative_to(ROOT)) for it in packages for path in it.rglob("__init__.py")}
    assert folders - named == set()


def test_every_named_file_exists() -> None:
    named = re.findall(
        r"`((?:protocol|basics|hisparse|coordinator|worker|kernels|metrics|tests)/[\w/.]*)`", ARCHITECTURE
    )
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def headings(text: str) -> set[str]:
    """As GitHub makes anchors of them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }


def test_every_relative_link_resolves() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")):
        links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", path.read_text())
        for file, anchor in links:
            target = path.parent / file if file else path
            assert target.exists(), f"{path.name}: {file}"
            assert not anchor or anchor in headings(target.read_text()), f"{path.name}: {file}#{anchor}"


# ---------------------------------------------------------------- architecture


def test_fence_table_matches_the_code() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\w, ]+) → ([\w, ]+) \| ", ARCHITECTURE, re.MULTILINE)
    assert rows[0] == ("fence", "producer", "consumer")
    documented = {name: (streams(producers), streams(consumers)) for name, producers, consumers in rows[1:]}
    declared = {name: (set(spec.producers), set(spec.consumers)) for name, spec in FENCES.items()}
    assert documented == declared


def streams(text: str) -> set[str]:
    return set(text.split(", "))


def test_request_lifecycle_names_every_state() -> None:
    diagram = ARCHITECTURE.split("## 4.")[1].split("```")[1]
    assert set(re.findall(r"[A-Z]{4,}", diagram)) == {state.value for state in State}


# ---------------------------------------------------------------- known bugs


@cache
def docstrings(path: str) -> dict[str, str]:
    """Of the tests and state machines of a file, by name."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, kinds)}


def test_each_known_bug_names_tests_that_mention_it() -> None:
    text = DOCUMENTS["known-bugs.md"]
    rows = re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 24))
    for number, bug, answer in rows:
        references = re.findall(r"#\d{5}\b", bug) or ["vLLM"]
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", answer)
        assert tests, number
        for path, test in tests:
            said = docstrings(path).get(test)
            assert said is not None, f"row {number}: {path} has no {test}"
            assert any(reference in said for reference in references), f"row {number}: {path}::{test}"
    assert len(re.findall(r"\.py::", text)) == sum(len(re.findall(r"`tests/[\w/]+\.py::\w+`", row[2])) for row in rows)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda it: it.name)
def test_pictures_load_nothing_from_elsewhere(picture: Path) -> None:
    assert re.findall(r"(?:url\([\"']?|href=[\"']|src=[\"'])(?!#)[^)\"']*|@import[^;]*", picture.read_text()) == []


def test_demo_picture_shows_the_demo_of_today() -> None:
    """Files that exist, notes that the code prints, and the hit rate and sizes that the README's caption names.
    `python -m tools.docs.demo_picture docs/demo.svg` draws it anew."""
    spans = re.findall(r"<text class=\"[\w-]+-r\d[^>]*>([^<]*)</text>", (ROOT / "docs" / "demo.svg").read_text())
    lines = "".join(map(html.unescape, spans)).replace("\xa0", " ").splitlines()
    prompts = [words[1] for line in lines if re.search("128 +0 ", line) and (words := line.split())]
    assert len(prompts) == 8
    assert [it for it in prompts if not (ROOT / it).is_file()] == []
    printed = "".join(path.read_text() for path in (ROOT / "hisparse" / "demo").glob("*.py"))
    notes = [line for line in lines if re.match("> (?!  )", line)]
    pieces = [piece for note in notes for piece in re.findall(r"(?<= )[a-z()]+(?: [a-z()]+)+(?=[ ,;:]|$)", note)]
    assert len(pieces) > 8
    assert [it for it in pieces if it not in printed] == []
    hits, slots, topk = re.findall(r"([\d.]+)% hits with (\d+) hot slots for top-(\d+);", "\n".join(lines))[0]
    caption = f"*{float(hits):.0f} % hits are few, on purpose: the hot buffers hold {slots} rows for a top-k of {topk},"
    assert caption in DOCUMENTS["README.md"]
