"""All metrics as Prometheus text."""

from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder


class MetricsPage(NamedTuple):
    """What `/metrics` answers."""

    body: bytes
    content_type: str


def new_registry() -> CollectorRegistry:
    """A registry of our own, with the process's memory, processor time and descriptors in it."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    return registry


def metrics_page(registry: CollectorRegistry, accept: str = "") -> MetricsPage:
    """The exposition in the format that suits the Accept header; OpenMetrics carries exemplars."""
    encode, content_type = choose_encoder(accept)
    return MetricsPage(encode(registry), content_type)
