"""How the service reads engines, bounds what comes from outside, logs, and what Envoy it expects."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.adapters.decision_writer import LogSettings
from extproc.adapters.server_tls import TlsFiles
from extproc.config.addresses import EndpointAddress, ListenAddress
from extproc.config.base import Seconds, Section
from extproc.prompt.template_guard import DEFAULT_LIMITS as _TEMPLATE
from extproc.prompt.template_guard import TemplateLimits
from extproc.protocol.body_limits import DEFAULT_LIMITS as _BODY
from extproc.protocol.body_limits import BodyLimits


class Scrape(Section):
    """How the engines' /metrics pages are read."""

    interval_s: Seconds = Field(1.0, description="seconds between scrapes of one worker")
    timeout_s: Seconds = Field(2.0, description="longest a scrape may take")
    models_interval_s: Seconds = Field(5.0, description="seconds between looks at a worker's /v1/models")
    failure_limit: Annotated[int, Field(ge=1)] = Field(
        3, description="failures in a row before not ready; late pages count while nothing is served only"
    )
    stale_after_s: Seconds = Field(5.0, description="older figures are not used")


class Limits(Section):
    """Bounds on what comes from outside."""

    body_bytes: Annotated[int, Field(gt=0)] = Field(64 << 20, description="larger request bodies get a 413")
    read_bytes: Annotated[int, Field(gt=0)] = Field(
        _BODY.read_bytes, description="larger bodies, decompressed, are not read, and routed by load"
    )
    json_values: Annotated[int, Field(gt=0)] = Field(
        _BODY.json_values, description="bodies with more JSON values than this are not read either"
    )
    messages: Annotated[int, Field(gt=0)] = Field(
        _BODY.messages, description="conversations of more messages are routed by load"
    )
    prompts: Annotated[int, Field(gt=0)] = Field(
        _BODY.prompts, description="completions of more prompts are routed by load"
    )
    headers: Annotated[int, Field(gt=0)] = Field(
        1000, description="requests with more headers are not read, and go on by Envoy's own balancing"
    )
    header_bytes: Annotated[int, Field(gt=0)] = Field(
        1 << 20, description="the same for longer headers, all together"
    )
    streams: Annotated[int, Field(gt=0)] = Field(
        10_000, description="requests at one time on one connection from Envoy; it opens more connections"
    )
    prompt_budget_ms: Annotated[float, Field(gt=0)] = Field(
        250.0, description="time for rendering and encoding; then the request is routed by load"
    )
    template_ms: Annotated[float, Field(gt=0)] = Field(
        _TEMPLATE.seconds * 1000, description="a chat template that runs longer is ended, where it loops next"
    )
    index_blocks: Annotated[int, Field(ge=0)] = Field(
        8_000_000,
        description="KV blocks known of all workers, about 150 bytes each; oldest claims go first; 0: none",
    )
    lease_expiry_s: Seconds = Field(1800.0, description="a request with no sign of life is written off")

    def body(self) -> BodyLimits:
        """The protocol's form of the bounds on bodies."""
        return BodyLimits(self.read_bytes, self.json_values, self.messages, self.prompts)

    def template(self) -> TemplateLimits:
        """The renderer's form of its bounds."""
        return TemplateLimits(seconds=self.template_ms / 1000)


Redactable = Literal["request_id", "model", "adapter", "prefix_key", "tenant", "details"]


class DecisionLog(Section):
    """One JSON line per finished request."""

    path: str = Field("-", description="file to append to; `-` is standard output, empty is off")
    sample: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share of requests written; failures and denied warm workers always are"
    )
    redact: list[Redactable] = Field(default_factory=list, description="fields whose values are hidden")
    max_mb: Annotated[float, Field(ge=0)] = Field(
        100.0, description="a larger file is rotated to `path.1`, `path.2` …; 0: never"
    )
    keep: Annotated[int, Field(ge=1)] = Field(3, description="rotated files that remain")

    def settings(self) -> LogSettings:
        """The writer's form of it."""
        return LogSettings(self.sample, frozenset(self.redact), round(self.max_mb * 1e6), self.keep)


class Tls(Section):
    """TLS of the gRPC port. Without it, plain text. The files are read again when they change."""

    certificate: Path = Field(description="PEM file with our certificate and what leads to its authority")
    key: Path = Field(description="PEM file with its key")
    client_ca: Path | None = Field(
        None,
        description="PEM file; clients must show a certificate of this authority; null: none is asked for",
    )

    def files(self) -> TlsFiles:
        """The server's form of it."""
        return TlsFiles(self.certificate, self.key, self.client_ca)


class RouterTls(Section):
    """How Envoy speaks TLS to us."""

    ca: Path = Field(description="PEM file with the authority of our certificate, as Envoy sees it")
    name: str | None = Field(
        None, description="DNS name our certificate must have; null: any of that authority"
    )
    certificate: Path | None = Field(
        None, description="PEM file with Envoy's certificate, for `tls.client_ca`"
    )
    key: Path | None = Field(None, description="PEM file with its key")

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key` belong together: name both or none")
        return self


class Envoy(Section):
    """What `warmroute envoy-config` builds."""

    listen: ListenAddress = Field("0.0.0.0:10000", description="where clients connect")
    admin: ListenAddress = Field("127.0.0.1:9901", description="Envoy's admin interface")
    router: list[EndpointAddress] = Field(
        default_factory=list, description="where Envoy finds us; default: `listen`, or each process"
    )
    router_tls: RouterTls | None = None
    body_mode: Literal["BUFFERED", "FULL_DUPLEX_STREAMED"] = Field(
        "BUFFERED", description="how Envoy hands us bodies"
    )
    message_timeout_s: Seconds = Field(1.0, description="then the request goes on without us")
    first_token_observer: bool = Field(default=False, description="tell us of first tokens while they happen")
    version: str = Field("1.40", description="Envoy that will read it, 1.36 to 1.40")
    retries: Annotated[int, Field(ge=0)] = Field(2, description="other workers tried when one refuses")
    retry_resets: bool = Field(
        default=True, description="try another also when one dies before its answer began; redoes its work"
    )
    stream_usage: bool = Field(
        default=True, description="read usage from streamed answers (Envoy 1.38 or newer)"
    )
    trace_collector: EndpointAddress | None = Field(
        None, description="`host:port` of an OpenTelemetry collector for Envoy's spans (OTLP/gRPC)"
    )
    trace_percent: Annotated[float, Field(ge=0, le=100)] = Field(
        100.0, description="requests in a hundred that Envoy traces where the client has not decided"
    )
    eds_file: Path | None = Field(
        None, description="worker list for Envoy; null: as the pools' discovery says"
    )
    eds: Literal["auto", "always", "never"] = Field(
        "auto", description="Envoy gets the workers from us over gRPC; auto: where it cannot find them itself"
    )
