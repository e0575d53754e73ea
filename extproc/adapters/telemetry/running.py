"""Telemetry from its start to its end, as the environment asks for it."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from extproc.adapters.deferred import Deferred
from extproc.adapters.telemetry.last_words import in_time
from extproc.adapters.telemetry.recorder import Telemetry
from extproc.adapters.telemetry.setup import choose, otlp_metrics, tracer_provider
from extproc.adapters.telemetry.spans import Spans


@asynccontextmanager
async def running_telemetry(
    environment: Mapping[str, str],
    *,
    version: str,
    clock: Callable[[], float],
    is_base_model: Callable[[str], bool],
    report: Callable[[str], None],
    later: Deferred | None = None,
) -> AsyncIterator[Telemetry]:
    """Telemetry that exports what the `OTEL_*` variables ask for, and at the end what is left of it.

    Args:
        environment: with the `OTEL_*` variables; the SDK reads the process's own for what we do not.
        version: of Warmroute.
        clock: monotonic seconds.
        is_base_model: whether a pool is known to serve a model of this name.
        report: told what is exported.
        later: puts off what need not be done before a request goes on. At the end all of it is done.

    Raises:
        TelemetryError: a variable asks for what there is not.
    """
    choice = choose(environment)
    async with AsyncExitStack() as stack:
        spans = None
        if choice.traces is not None:
            provider, sender = tracer_provider(choice.traces, version)
            stack.push_async_callback(in_time, provider.shutdown, sender.shutdown)
            spans = Spans(provider.get_tracer("warmroute", version))
            report(f"traces: OTLP over {choice.traces}")
        telemetry = Telemetry(clock, is_base_model, spans, later)
        if choice.metrics is not None:
            exporter = otlp_metrics(choice.metrics, telemetry.registry, version, choice.metrics_interval_s)
            exporter.start()
            stack.push_async_callback(exporter.close)
            report(f"metrics: OTLP over {choice.metrics}, every {choice.metrics_interval_s:g} s")
        if later is not None:
            stack.callback(later.close)
        yield telemetry
