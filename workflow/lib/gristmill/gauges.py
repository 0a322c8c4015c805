"""What an engine's /metrics says of its queue, its KV cache and its work; vLLM, SGLang and llama.cpp."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^\n]*\})?[ \t]+([-+.\w]+)", re.M)


@dataclass(frozen=True, slots=True)
class Gauges:
    """A reading; None for what the engine does not export.

    running, waiting: requests. kv_use: share of the KV cache in use. The others are counters since its start:
    prompt_tokens, generated_tokens, prefix_queries and prefix_hits in tokens, preemptions in requests.
    """

    running: float
    waiting: float
    kv_use: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None


# Field → the names that engines gave it, in order of preference. `*_created` stands beside each counter and is none.
_NAMES: dict[str, Sequence[str]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    "kv_use": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total", "llamacpp:prompt_tokens_total"),
    "generated_tokens": (
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "sglang:cached_tokens_total"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
}
_SHARES = {"kv_use"}


def parse(text: str) -> Gauges | None:
    """Read the Prometheus text of an engine; None when it has no queue of a known name.

    An engine of several ranks has a line for each: requests and tokens are added up, of shares the largest counts.
    """
    values: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            values.setdefault(name, []).append(number)
    found: dict[str, float] = {}
    for field, names in _NAMES.items():
        for name in names:
            if name in values:
                found[field] = max(values[name]) if field in _SHARES else sum(values[name])
                break
    if "running" not in found or "waiting" not in found:
        return None
    return Gauges(**found)
