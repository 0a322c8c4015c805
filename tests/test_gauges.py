"""Readings of engines' /metrics."""

from __future__ import annotations

from gristmill.gauges import Gauges, parse

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 8.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.76e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 700.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:generation_tokens_total{engine="0",model_name="m"} 4242.0
vllm:generation_tokens_created{engine="0",model_name="m"} 1.76e+09
"""
SGLANG = """
sglang:num_running_reqs{model_name="m"} 5.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.5
sglang:generation_tokens_total{model_name="m"} 10.0
"""
LLAMACPP = """
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
llamacpp:requests_deferred 1
llamacpp:prompt_tokens_total 99
llamacpp:tokens_predicted_total 7
"""


def test_vllm() -> None:
    """Ranks are added up, the fullest KV cache counts, and *_created is no counter."""
    assert parse(VLLM) == Gauges(20, 3, 0.75, 1.5e6, 4242, 1000, 700, 2)


def test_sglang() -> None:
    assert parse(SGLANG) == Gauges(5, 2, 0.5, generated_tokens=10)


def test_llamacpp() -> None:
    assert parse(LLAMACPP) == Gauges(4, 1, None, 99, 7)


def test_what_is_no_engine() -> None:
    for text in ("", "<html>404</html>", "up 1\n", "vllm:num_requests_running{} 3\n", "vllm:num_requests_waiting x"):
        assert parse(text) is None
    assert parse("vllm:num_requests_running NaN2\n" + LLAMACPP) == Gauges(4, 1, None, 99, 7)
