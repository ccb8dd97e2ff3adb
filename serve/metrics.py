"""Metrics for Prometheus, under vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from outrider.runtime.stats import DecodeStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Of one served model.

    Args:
        largest_k: positions of drafts that are counted apart.
        gauges: by name and help, what is read when somebody asks.
    """

    def __init__(self, model: str, largest_k: int, gauges: dict[tuple[str, str], Callable[[], float]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._model = model
        self._largest_k = largest_k
        for (name, text), read in gauges.items():
            self._metric(Gauge, name, text).set_function(read)
        self._prompt = self._metric(Counter, "prompt_tokens", "Prompt tokens.")
        self._cached = self._metric(Counter, "prefix_cache_hits", "Prompt tokens that a cache held already.")
        self._queried = self._metric(Counter, "prefix_cache_queries", "Prompt tokens that were looked for in caches.")
        self._generated = self._metric(Counter, "generation_tokens", "Generated tokens.")
        self._rounds = self._metric(Counter, "spec_decode_num_drafts", "Rounds in which something was drafted.")
        self._drafted = self._metric(Counter, "spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = self._metric(Counter, "spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their place in the round.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._success = Counter(
            "vllm:request_success", "Requests.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._first = self._metric(
            Histogram, "time_to_first_token_seconds", "From request to first token.", buckets=_SECONDS
        )
        self._each = self._metric(
            Histogram, "request_time_per_output_token_seconds", "Of a request, behind its first.", buckets=_SECONDS
        )
        self._whole = self._metric(
            Histogram, "e2e_request_latency_seconds", "From request to last token.", buckets=_SECONDS
        )

    def finished(self, reason: str, stats: DecodeStats, first: float | None, seconds: float) -> None:
        """A request is over.

        Args:
            reason: its finish reason, or ``abort`` or ``error``.
            first: seconds until the first token, None where none came.
            seconds: of the whole.
        """
        self._success.labels(self._model, reason).inc()
        self._prompt.inc(stats.num_prompt_tokens)
        self._queried.inc(stats.num_prompt_tokens)
        self._cached.inc(stats.num_cached_tokens)
        self._generated.inc(stats.num_output_tokens)
        self._drafted.inc(stats.num_draft_tokens)
        self._accepted.inc(stats.num_accepted_draft_tokens)
        self._rounds.inc(stats.num_drafts)
        for position in range(self._largest_k):
            reached = sum(stats.acceptance_histogram[position + 1 :])
            self._by_position.labels(self._model, str(position)).inc(reached)
        self._whole.observe(seconds)
        if first is not None:
            self._first.observe(first)
            if stats.num_output_tokens > 1:
                self._each.observe((seconds - first) / (stats.num_output_tokens - 1))

    def families(self) -> list[Metric]:
        return list(self._registry.collect())

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _metric(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        return kind(f"vllm:{name}", text, ["model_name"], registry=self._registry, **options).labels(self._model)


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def of_replicas(replicas: Mapping[str, Sequence[Metric]]) -> bytes:
    """The text of many replicas' families by name of replica, which the label ``replica`` tells."""
    merged: dict[str, Metric] = {}
    for replica, families in replicas.items():
        for family in families:
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            into.samples += [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]
    registry = CollectorRegistry()
    registry.register(_Collected(merged.values()))
    return generate_latest(registry)
