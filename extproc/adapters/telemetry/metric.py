"""What a metric is, and what many of them share: units, sets of labels, bounds of buckets."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """As in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: see the catalogue.
        kind: counter, gauge or histogram.
        unit: UCUM, as OpenTelemetry wants it.
        meaning: one sentence for its HELP line.
        labels: in order.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """The name in the Prometheus exposition (for a histogram, of its family)."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series in Prometheus."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}{part}" for part in ("_bucket", "_count", "_sum"))
        return (self.exposed,)


REQUEST, TOKEN, BLOCK, SECOND, BYTE, ONE = "{request}", "{token}", "{block}", "s", "By", "1"

LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)

WORKER = ("pool", "worker")
CLASS = ("pool", "prompt_class")
MODE = "mode"


def counter(name: str, unit: str, meaning: str, labels: tuple[str, ...]) -> Metric:
    """A counter."""
    return Metric(name, Kind.COUNTER, unit, meaning, labels)


def gauge(name: str, unit: str, meaning: str, labels: tuple[str, ...] = ()) -> Metric:
    """A gauge."""
    return Metric(name, Kind.GAUGE, unit, meaning, labels)


def histogram(name: str, meaning: str, labels: tuple[str, ...], buckets: tuple[float, ...] = LONG) -> Metric:
    """A histogram of times."""
    return Metric(name, Kind.HISTOGRAM, SECOND, meaning, labels, buckets)
