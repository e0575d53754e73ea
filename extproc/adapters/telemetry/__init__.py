"""What operators see: metrics and traces, made from values the router returned.

Nothing in here decides anything, and nothing the router does waits for it. A request leaves two traces of
itself, one when it is routed (`decided`, `rejected`) and one when it has ended (`finished`); what has a value
at any time (load, trust, the age of signals) is read when somebody asks (`state`).

| module | what it is |
|---|---|
| `metric` | what a metric is |
| `catalogue` | every metric: name, unit, labels, meaning; the reference is generated from it |
| `stages` | where the time of one decision goes |
| `request_metrics`, `tally` | counts and histograms of requests |
| `state_metrics` | gauges, read from the router's snapshot when somebody asks |
| `registry` | all of it as Prometheus text |
| `otlp_metrics` | all of it to an OpenTelemetry collector |
| `attributes`, `spans` | traces |
| `setup` | what the `OTEL_*` variables ask for |
| `running` | from start to end |
| `recorder` | the one object the rest of the service talks to |
"""
