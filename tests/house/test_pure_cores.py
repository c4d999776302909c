"""The decisions are pure: no clock, no randomness, no tasks, no sockets, no tensors. Their imports say so."""

from __future__ import annotations

import ast

import pytest

from tests import ROOT

PURE = [
    "coordinator/gateway/kv_format",
    "coordinator/gateway/subscriptions",
    "coordinator/journal/chain",
    "coordinator/journal/ledger_image",
    "coordinator/journal/records",
    "coordinator/journal/state",
    "coordinator/journal/summary",
    "coordinator/listener/connection_tracker",
    "coordinator/listener/rate_limiter",
    "coordinator/listener/unfinished",
    "coordinator/memory/audit",
    "coordinator/memory/changes",
    "coordinator/memory/ledger",
    "coordinator/memory/page_ages",
    "coordinator/memory/prefix_index",
    "coordinator/scheduling/candidates",
    "coordinator/scheduling/commands",
    "coordinator/scheduling/decisions",
    "coordinator/scheduling/dispatch",
    "coordinator/scheduling/effects",
    "coordinator/scheduling/following",
    "coordinator/scheduling/free_memory",
    "coordinator/scheduling/groups",
    "coordinator/scheduling/lifecycle",
    "coordinator/scheduling/entries",
    "coordinator/scheduling/poison",
    "coordinator/scheduling/pending",
    "coordinator/scheduling/policy",
    "coordinator/scheduling/preemption",
    "coordinator/scheduling/hot_sizing",
    "coordinator/scheduling/kv_events",
    "coordinator/scheduling/prefill_costs",
    "coordinator/scheduling/prefix_reuse",
    "coordinator/scheduling/reconciliation",
    "coordinator/scheduling/recovery",
    "coordinator/scheduling/request_state",
    "coordinator/scheduling/request_table",
    "coordinator/scheduling/placement_table",
    "coordinator/scheduling/shortcut",
    "coordinator/scheduling/throughput",
    "coordinator/scheduling/turns",
    "coordinator/scheduling/validation",
    "coordinator/scheduling/waits",
    "coordinator/scheduling/warm_start",
    "coordinator/scheduling/worker_registry",
    "coordinator/tokens/logprob_rows",
    "coordinator/tokens/token_log",
    "coordinator/tokens/token_times",
    "coordinator/tracing/spans",
    "coordinator/workers/command_log",
    "coordinator/workers/tokenizer_store",
    "coordinator/workers/worker_epoch",
    "coordinator/workers/worker_hello",
    "hisparse/cluster/placement",
    "hisparse/console/rows",
    "hisparse/console/table",
    "hisparse/demo/compare",
    "hisparse/demo/plan",
    "hisparse/http/answers",
    "hisparse/http/anthropic/answers",
    "hisparse/http/anthropic/bodies",
    "hisparse/http/apis",
    "hisparse/http/asks",
    "hisparse/http/bodies",
    "hisparse/http/chat",
    "hisparse/http/chat_bodies",
    "hisparse/http/cors",
    "hisparse/http/decoding",
    "hisparse/http/errors",
    "hisparse/http/formats/arguments",
    "hisparse/http/formats/call_grammars",
    "hisparse/http/formats/conversation",
    "hisparse/http/formats/deepseek",
    "hisparse/http/formats/glm",
    "hisparse/http/formats/known",
    "hisparse/http/formats/lark",
    "hisparse/http/formats/replies",
    "hisparse/http/formats/scanning",
    "hisparse/http/generation",
    "hisparse/http/grammars",
    "hisparse/http/logprobs",
    "hisparse/http/openapi",
    "hisparse/http/request_state",
    "hisparse/http/responses/answers",
    "hisparse/http/responses/bodies",
    "hisparse/http/tokens",
    "hisparse/http/structured",
    "hisparse/http/tools",
    "hisparse/http/arrears",
    "hisparse/http/rota",
    "hisparse/http/wire",
    "hisparse/http/shares",
    "hisparse/http/prompts",
    "hisparse/ray/plan",
    "hisparse/top/keys",
    "hisparse/top/sample",
    "hisparse/top/screen",
    "kernels/cuda/block_plans",
    "protocol/arrays",
    "protocol/byte_sizes",
    "hisparse/manifests/monitoring",
    "hisparse/manifests/network",
    "hisparse/manifests/pods",
    "hisparse/manifests/values",
    "hisparse/manifests/yaml_text",
    "protocol/config_checks",
    "protocol/errors",
    "protocol/inventory",
    "protocol/logprobs",
    "protocol/messages",
    "protocol/sizing",
    "protocol/skew",
    "protocol/trace_context",
    "protocol/units",
    "worker/device/step_rows",
    "worker/loop/acceptance",
    "worker/loop/draft_length",
    "worker/loop/batch",
    "worker/loop/output",
    "worker/loop/reuse",
    "worker/loop/selections",
    "worker/loop/topk_bytes",
    "worker/runners/adjust",
    "worker/group/agreement",
    "worker/group/awaiting",
    "worker/group/hub",
    "worker/group/messages",
    "worker/group/newcomers",
    "worker/weights/dimensions",
    "worker/weights/shares",
    "worker/transfer/handover",
    "worker/transfer/layer_groups",
    "worker/transfer/outgoing",
    "worker/transfer/receiving",
    "worker/transfer/sender_actions",
    "worker/transfer/sending",
    "worker/transfer/wire",
    "worker/weights/layout",
    "worker/weights/quantization",
    "worker/weights/safetensors_header",
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


@pytest.mark.parametrize("module", PURE)
def test_pure_cores_import_no_side_effects(module: str) -> None:
    assert {name.split(".")[0] for name in reached(module)} & FORBIDDEN == set()
