"""The decisions are pure: no clock, no randomness, no tasks, no sockets, no tensors. Their imports say so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PURE = [
    "arrays",
    "config_checks",
    "demo/compare",
    "demo/plan",
    "errors",
    "gateway/subscriptions",
    "gateway/token_log",
    "gateway/token_times",
    "http/answers",
    "http/asks",
    "http/bodies",
    "http/chat",
    "http/errors",
    "http/prompts",
    "http/shares",
    "http/wire",
    "journal/book",
    "journal/inventory",
    "journal/records",
    "journal/recovery",
    "journal/summary",
    "memory/audit",
    "memory/changes",
    "memory/ledger",
    "memory/ledger_image",
    "memory/page_ages",
    "messages",
    "scheduling/decisions",
    "scheduling/dispatch",
    "scheduling/fleet",
    "scheduling/intake",
    "scheduling/last_topk",
    "scheduling/lifecycle",
    "scheduling/live",
    "scheduling/members",
    "scheduling/policy",
    "scheduling/request_state",
    "scheduling/room",
    "scheduling/roster",
    "scheduling/sizing",
    "scheduling/space",
    "scheduling/steps",
    "scheduling/suspicion",
    "scheduling/verbs",
    "scheduling/waits",
    "sizes",
    "top/keys",
    "top/sample",
    "top/screen",
    "transport/lobby",
    "transport/meter",
    "workers/command_log",
    "workers/tokenizer_store",
    "workers/worker_epoch",
    "workers/worker_hello",
]
PURE_IN_WORKERS = [
    "batch",
    "handover",
    "layer_groups",
    "output",
    "transfer/outgoing",
    "transfer/receiving",
    "transfer/sender_actions",
    "transfer/sending",
    "transfer/wire",
]
FORBIDDEN = {"trio", "zmq", "torch", "time", "random", "datetime", "os", "threading", "asyncio", "socket", "logging"}


def imports_of(module: str) -> set[str]:
    """Modules that a file imports when it runs; what only type checkers read does not count."""
    tree = ast.parse((ROOT / f"{module}.py").read_text())
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def reached(module: str) -> set[str]:
    """Everything that a module imports, through modules of our own too."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        for name in imports_of(todo.pop()):
            path = name.replace(".", "/")
            if name not in seen:
                seen.add(name)
                if (ROOT / f"{path}.py").exists():
                    todo.append(path)
    return seen


@pytest.mark.parametrize(
    "module", [f"coordinator/{name}" for name in PURE] + [f"worker/{name}" for name in PURE_IN_WORKERS]
)
def test_a_pure_core_reaches_nothing_that_acts(module: str) -> None:
    assert {name.split(".")[0] for name in reached(module)} & FORBIDDEN == set()
