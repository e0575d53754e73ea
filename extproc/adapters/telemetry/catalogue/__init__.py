"""Every metric there is: the exporters, the reference and the checks of dashboard and alerts read this table.

Names are those of the Prometheus exposition without `_total`, which it adds to counters; OTLP carries them as
they stand here, so that a collector that turns OTLP into Prometheus gives the same series. Times are seconds.

Every label has few values, whatever clients send: models are those the engines serve, classes of prompts the
first `labels.MAX_VALUES` seen, and workers the members; anything beyond is `other`.
"""

from collections.abc import Sequence

from extproc.adapters.telemetry.catalogue.fleet import FLEET_METRICS
from extproc.adapters.telemetry.catalogue.requests import REQUEST_METRICS
from extproc.adapters.telemetry.catalogue.service import SERVICE_METRICS
from extproc.adapters.telemetry.metric import Metric

STATE_METRICS: Sequence[Metric] = (*SERVICE_METRICS, *FLEET_METRICS)
"""Read when somebody asks."""

METRICS: Sequence[Metric] = (*REQUEST_METRICS, *STATE_METRICS)
