"""Pools: which engines there are, what they serve, and how their prompts become token ids."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from extproc.adapters.engine_key import EngineKey, EngineKeyError
from extproc.config.addresses import EndpointAddress, HostName, KvEndpoint
from extproc.config.base import ConfigError, Seconds, Section
from extproc.config.normalization import Normalization


class KvEvents(Section):
    """Where a pool's engines publish KV events. `*` or no host means the worker's own host."""

    enabled: bool = Field(default=True, description="subscribe to KV events")
    endpoint: KvEndpoint = Field(
        "tcp://*:5557",
        description="ZMQ PUB endpoint, as in the engines' --kv-events-config; rank r has port + r",
    )
    replay: KvEndpoint | None = Field(
        "tcp://*:5558", description="ZMQ replay endpoint, likewise; null: no replay"
    )
    bind: bool = Field(default=False, description="the engines connect to us; `endpoint` is our address")
    topic: str = Field("", description="ZMQ topic prefix to subscribe to")


class Dns(Section):
    """Workers behind a DNS name; every address it resolves to is a worker."""

    name: HostName = Field(description="host name, resolved by the system")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(description="port of every worker")
    interval_s: Seconds = Field(5.0, description="seconds between resolutions")


class Kubernetes(Section):
    """Workers behind a Kubernetes Service, by a watch on its EndpointSlices (extra `kubernetes`)."""

    service: str = Field(min_length=1, description="name of the Service")
    namespace: str | None = Field(None, description="its namespace; null: our own")
    port: int | str | None = Field(None, description="number or name of its port; null: its only one")
    kubeconfig: Path | None = Field(None, description="cluster and login; null: the pod's service account")
    context: str | None = Field(None, description="context of the kubeconfig; null: its current one")


class StaticWorker(Section):
    """One engine server, with its own KV endpoints where they differ from the pool's."""

    endpoint: EndpointAddress = Field(description="`host:port`")
    dp_size: Annotated[int, Field(ge=1)] | None = Field(None, description="null: as the pool says")
    dp_start_rank: Annotated[int, Field(ge=0)] | None = Field(None, description="null: as the pool says")
    kv_events: KvEndpoint | None = Field(None, description="its own KV event endpoint")
    kv_replay: KvEndpoint | None = Field(None, description="its own replay endpoint")
    revision: str | None = Field(None, description="model revision it serves; null: as the pool says")
    cold: bool = Field(default=False, description="serves cold requests only, under token-load")


class Discovery(Section):
    """Where the workers of a pool are found. Several sources are merged."""

    static: list[StaticWorker] = Field(default_factory=list, description="`ip:port`, or a mapping")
    file: Path | None = Field(None, description="watched list of endpoints; Envoy's EDS file form works too")
    dns: Dns | None = None
    kubernetes: Kubernetes | None = None

    @field_validator("static", mode="before")
    @classmethod
    def _plain_endpoints(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"endpoint": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _some_source(self) -> Self:
        if not (self.static or self.file or self.dns or self.kubernetes):
            raise ValueError("name at least one source of workers: `static`, `file`, `dns` or `kubernetes`")
        return self


class Revision(Section):
    """Another revision that workers of the pool may serve, as while an update rolls through it."""

    revision: str = Field(description="as workers name it")
    path: Path | None = Field(None, description="its folder, where tokenizer or template differ; null: same")
    chat_template: Path | None = Field(None, description="template file, when the engine runs with one")


class Model(Section):
    """How prompts become token ids. Must be what the engines serve."""

    path: Path | None = Field(
        None,
        description="folder with the model's tokenizer.json, tokenizer_config.json, config.json and, if any, "
        "chat_template.jinja or .json; null: route by load only",
    )
    names: list[str] = Field(default_factory=list, description="served base model names; others are adapters")
    revision: str = Field("", description="model revision: engines of another revision share no KV")
    revision_from: Literal["config", "models"] = Field(
        "config",
        description="models: a worker's revision is the `root` of its /v1/models; config: what is written",
    )
    revisions: list[Revision] = Field(default_factory=list)
    chat_template: Path | None = Field(None, description="template file, when the engine runs with one")
    content_format: Literal["auto", "string", "openai"] = Field(
        "auto", description="as the engine's --chat-template-content-format"
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="as the engine's --default-chat-template-kwargs"
    )
    fast_tokenizer: Literal["auto", "off"] = Field(
        "auto", description="use fastokens if installed and its ids agree with tokenizers at load"
    )
    prompt_cache_mb: Annotated[float, Field(ge=0)] = Field(
        128,
        description="memory for prompt texts and their ids, so that only new text is encoded; 0: none",
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=False, description="as the engine's flag of that name"
    )
    worker_tokenize: Literal["off", "tokenize", "render"] = Field(
        "off", description="ask a worker (its /tokenize or /render) where local rendering is not supported"
    )


class Pool(Section):
    """A set of workers serving one base model."""

    name: str = Field("default", description="what logs call it")
    model: Model = Field(default_factory=Model)
    discovery: Discovery
    dp_size: Annotated[int, Field(ge=1)] = Field(1, description="data-parallel ranks behind each endpoint")
    dp_start_rank: Annotated[int, Field(ge=0)] | None = Field(
        None, description="number of the first of them; null: 0, or where there is one, what its metrics say"
    )
    kv_events: KvEvents = Field(default_factory=KvEvents)
    block_size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="tokens per KV block until an engine tells; null: claim nothing until then"
    )
    api_key_file: Path | None = Field(
        None,
        description="file with the engines' --api-key, for what we ask them ourselves; read again when they "
        "refuse it; null: none",
    )
    normalization: Normalization = Field(default_factory=Normalization)

    def engine_key(self, pause_s: float, clock: Callable[[], float]) -> EngineKey | None:
        """The key of its engines; None when they ask for none.

        Args:
            pause_s: least seconds between two readings of the file.
            clock: seconds, monotonic.

        Raises:
            ConfigError: it cannot be read.
        """
        if self.api_key_file is None:
            return None
        try:
            return EngineKey(self.api_key_file, pause_s=pause_s, clock=clock)
        except EngineKeyError as error:
            raise ConfigError(f"pool {self.name}: api_key_file: {error}") from None
