"""The simulated engine's `/metrics` page: vLLM 0.32's families, names, labels and texts."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from extproc.sim.engine_model import EngineModel
from extproc.sim.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PHASE = "Histogram of time spent in {} phase for request."


class EngineMetricsPage(Collector):
    """Renders a model's counters.

    Args:
        model: The engine.
        model_name: Value of the `model_name` label.
        max_loras: How many adapters it has; 0 leaves `vllm:lora_requests_info` out, as the engine does.
        engine: Data-parallel rank, the `engine` label.

    Attributes:
        asleep: Tell that the engine was put to sleep.
    """

    def __init__(self, model: EngineModel, model_name: str, max_loras: int, engine: int = 0) -> None:
        self._model = model
        self._labels = {"engine": str(engine), "model_name": model_name}
        self._max_loras = max_loras
        self.asleep = False
        self._created = time.time()
        self._adapters_seen: dict[tuple[str, str], float] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The page, in the text exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every family, in the engine's order."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        yield self._cache_config()

    def _gauges(self) -> Iterator[Metric]:
        reported = self._model.reported
        yield self._gauge(
            "num_requests_running", "Number of requests in model execution batches.", reported.running
        )
        yield self._gauge(
            "num_requests_waiting", "Number of requests waiting to be processed.", reported.waiting
        )
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            labels=[*self._labels, "reason"],
        )
        for reason, value in (("capacity", reported.waiting), ("deferred", 0)):
            by_reason.add_metric([*self._labels.values(), reason], value)
        yield by_reason
        sleep = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            labels=[*self._labels, "sleep_state"],
        )
        for state, on in (
            ("awake", not self.asleep),
            ("weights_offloaded", self.asleep),
            ("discard_all", False),
        ):
            sleep.add_metric([*self._labels.values(), state], float(on))
        yield sleep
        yield self._gauge(
            "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", reported.kv_usage
        )
        if self._max_loras:
            yield self._adapters()

    def _counters(self) -> Iterator[Metric]:
        stats = self._model.stats
        cached = stats.prompt_tokens - stats.computed_tokens
        yield self._counter(
            "prefix_cache_queries",
            "Prefix cache queries, in terms of number of queried tokens.",
            stats.prefix_queries,
        )
        yield self._counter(
            "prefix_cache_hits",
            "Prefix cache hits, in terms of number of cached tokens.",
            stats.prefix_hits,
        )
        yield self._counter(
            "num_preemptions", "Cumulative number of preemption from the engine.", stats.preemptions
        )
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", stats.prompt_tokens)
        sources = {
            "local_compute": stats.computed_tokens,
            "local_cache_hit": cached,
            "external_kv_transfer": 0,
        }
        yield self._counter_by(
            "prompt_tokens_by_source", "Number of prompt tokens by source.", "source", sources
        )
        yield self._counter(
            "prompt_tokens_cached", "Number of cached prompt tokens (local + external).", cached
        )
        tiers = {"device": stats.prefix_hits, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": 0}
        yield self._counter_by(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            "source",
            tiers,
        )
        yield self._counter(
            "generation_tokens", "Number of generation tokens processed.", stats.generation_tokens
        )
        yield self._counter_by(
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            {**stats.finished, "error": 0, "repetition": 0},
        )

    def _histograms(self) -> Iterator[Metric]:
        stats = self._model.stats
        for name, text, histogram in (
            ("request_prompt_tokens", "Number of prefill tokens processed.", stats.request_prompt),
            ("request_generation_tokens", "Number of generation tokens processed.", stats.request_generation),
            ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", stats.step_tokens),
            ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", stats.ttft),
            (
                "inter_token_latency_seconds",
                "Histogram of inter-token latency in seconds.",
                stats.inter_token,
            ),
            (
                "request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                stats.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", stats.e2e),
            ("request_queue_time_seconds", _PHASE.format("WAITING"), stats.queue),
            ("request_inference_time_seconds", _PHASE.format("RUNNING"), stats.inference),
            ("request_prefill_time_seconds", _PHASE.format("PREFILL"), stats.prefill),
            ("request_decode_time_seconds", _PHASE.format("DECODE"), stats.decode),
            (
                "request_num_preemptions",
                "Histogram of the number of times a request was preempted.",
                stats.request_preemptions,
            ),
            (
                "request_prefill_kv_computed_tokens",
                "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
                stats.prefill_computed,
            ),
        ):
            yield self._histogram(name, text, histogram)

    def _cache_config(self) -> Metric:
        config = self._model.config
        labels = {
            "block_size": str(config.block_size),
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "engine": self._labels["engine"],
            "kv_cache_size_tokens": str((config.num_gpu_blocks - 1) * config.block_size),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(config.num_gpu_blocks),
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": "None",
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=list(labels)
        )
        family.add_metric(list(labels.values()), 1.0)
        return family

    def _adapters(self) -> Metric:
        # As in the engine, the value is when a combination was last true, and old combinations stay.
        running, waiting = (",".join(sorted(names)) for names in self._model.adapters())
        self._adapters_seen[waiting, running] = time.time()
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        for (was_waiting, was_running), at in self._adapters_seen.items():
            family.add_metric([str(self._max_loras), was_running, was_waiting], at)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value, created=self._created)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value, created=self._created)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.total)
        return family
