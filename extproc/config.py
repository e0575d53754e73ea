"""Configuration: one YAML (or JSON) file, read once, validated with errors that name line and fix."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from extproc.core.cost import CostSettings
from extproc.core.errors import WarmrouteError
from extproc.core.policies import POLICIES
from extproc.core.router import RouterSettings

Seconds = Annotated[float, Field(gt=0)]
PolicyName = Literal["token-load", "least-load", "round-robin"]


class ConfigError(WarmrouteError):
    """The configuration cannot be used; the message says where and why."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KvEvents(_Section):
    """Where a pool's engines publish KV events. `*` or no host means the worker's own host."""

    enabled: bool = True
    endpoint: str = Field("tcp://*:5557", description="ZMQ PUB endpoint of data-parallel rank 0")
    replay: str | None = Field("tcp://*:5558", description="ZMQ replay endpoint of rank 0; null: no replay")
    bind: bool = Field(default=False, description="the engines connect to us; `endpoint` is our address")
    topic: str = Field("", description="ZMQ topic prefix to subscribe to")


class Dns(_Section):
    """Workers behind a DNS name; every address it resolves to is a worker."""

    name: str
    port: Annotated[int, Field(ge=1, le=65535)]
    interval_s: Seconds = 5.0


class StaticWorker(_Section):
    """One engine server, with its own KV endpoints where they differ from the pool's."""

    endpoint: str
    dp_size: Annotated[int, Field(ge=1)] = 1
    kv_events: str | None = None
    kv_replay: str | None = None


class Discovery(_Section):
    """Where the workers of a pool are found. Several sources are merged."""

    static: list[StaticWorker] = Field(default_factory=list, description="`ip:port`, or a mapping")
    file: Path | None = Field(None, description="watched list of endpoints; Envoy's EDS file form works too")
    dns: Dns | None = None

    @field_validator("static", mode="before")
    @classmethod
    def _plain_endpoints(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"endpoint": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _some_source(self) -> Self:
        if not (self.static or self.file or self.dns):
            raise ValueError("name at least one source of workers: `static`, `file` or `dns`")
        return self


class Scrape(_Section):
    """How the engines' /metrics pages are read."""

    interval_s: Seconds = 1.0
    timeout_s: Seconds = 2.0
    failure_limit: Annotated[int, Field(ge=1)] = Field(3, description="failures in a row before not ready")
    stale_after_s: Seconds = Field(5.0, description="older figures are not used")


class Model(_Section):
    """How prompts become token ids. Must be what the engines serve."""

    path: Path | None = Field(
        None, description="folder with tokenizer.json and tokenizer_config.json; null: route by load only"
    )
    names: list[str] = Field(default_factory=list, description="served base model names; others are adapters")
    revision: str = Field("", description="model revision: engines of another revision share no KV")
    chat_template: Path | None = Field(None, description="template file, when the engine runs with one")
    content_format: Literal["auto", "string", "openai"] = "auto"
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    fast_tokenizer: Literal["auto", "off"] = "auto"
    worker_tokenize: bool = Field(
        default=False, description="ask a worker's /tokenize where local rendering is not supported"
    )


class Pool(_Section):
    """A set of workers serving one base model."""

    name: str = "default"
    model: Model = Field(default_factory=Model)
    discovery: Discovery
    kv_events: KvEvents = Field(default_factory=KvEvents)
    scrape: Scrape = Field(default_factory=Scrape)
    block_size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="tokens per KV block until an engine tells; null: claim nothing until then"
    )


_COST = CostSettings()


class Cost(_Section):
    """Coefficients of the cost model; see `extproc/core/cost.py` for the formula."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = _COST.prefill_tokens_per_s
    quadratic_ms: Annotated[float, Field(ge=0)] = _COST.quadratic_ms
    reload_tokens_per_s: Annotated[float, Field(gt=0)] = _COST.reload_tokens_per_s
    step_ms_per_sequence: Annotated[float, Field(ge=0)] = _COST.step_ms_per_sequence
    step_ms_per_1k_context: Annotated[float, Field(ge=0)] = _COST.step_ms_per_1k_context
    interference: Annotated[float, Field(ge=0)] = _COST.interference
    expected_output_tokens: Annotated[float, Field(gt=0)] = _COST.expected_output_tokens
    tie_ms: Annotated[float, Field(ge=0)] = _COST.tie_ms

    def settings(self) -> CostSettings:
        """The core's form of it."""
        return CostSettings(**self.model_dump())


class Limits(_Section):
    """Bounds on what comes from outside."""

    body_bytes: Annotated[int, Field(gt=0)] = Field(64 << 20, description="larger request bodies get a 413")
    prompt_budget_ms: Annotated[float, Field(gt=0)] = Field(
        250.0, description="time for rendering and encoding; then the request is routed by load"
    )
    lease_expiry_s: Seconds = Field(1800.0, description="a request with no sign of life is written off")


class DecisionLog(_Section):
    """One JSON line per finished request."""

    path: str = Field("-", description="file to append to; `-` is standard output, empty is off")


class Envoy(_Section):
    """What `warmroute envoy-config` builds."""

    listen: str = "0.0.0.0:10000"
    admin: str = "127.0.0.1:19000"
    router: list[str] = Field(default_factory=list, description="where Envoy finds us; default: `listen`")
    body_mode: Literal["BUFFERED", "FULL_DUPLEX_STREAMED"] = "BUFFERED"
    message_timeout_s: Seconds = 0.5
    first_token_observer: bool = False
    version: str = "1.40"
    eds_file: Path | None = Field(
        None, description="worker list for Envoy; default: the pool's discovery file, names or addresses"
    )


class Config(_Section):
    """Everything `warmroute serve` needs."""

    listen: str = Field("127.0.0.1:50051", description="gRPC address for Envoy: ext_proc, access log, health")
    pools: Annotated[list[Pool], Field(min_length=1)]
    policy: PolicyName = "token-load"
    fallbacks: Annotated[int, Field(ge=1)] = Field(3, description="endpoints named per request, in order")
    seed: int | None = Field(None, description="seed of the tie-breaks; null: random")
    test_mode: bool = Field(default=False, description="honour conformance test headers; never in production")
    cost: Cost = Field(default_factory=Cost)
    limits: Limits = Field(default_factory=Limits)
    decision_log: DecisionLog = Field(default_factory=DecisionLog)
    envoy: Envoy = Field(default_factory=Envoy)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ, got {', '.join(names)}")
        owners: dict[str, str] = {}
        for pool in self.pools:
            for model in pool.model.names:
                if owners.setdefault(model, pool.name) != pool.name:
                    raise ValueError(f"model {model!r} is in two pools: {owners[model]} and {pool.name}")
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}; choose from {', '.join(POLICIES)}")
        return self

    def router_settings(self) -> RouterSettings:
        """The core's form of the settings. Scrape settings are the first pool's."""
        scrape = self.pools[0].scrape
        return RouterSettings(
            stale_after_s=scrape.stale_after_s,
            failure_limit=scrape.failure_limit,
            lease_expiry_s=self.limits.lease_expiry_s,
            default_block_size=self.pools[0].block_size,
        )


def load(path: Path | str) -> Config:
    """Read and validate a configuration file. Relative paths in it are relative to the file.

    Raises:
        ConfigError: naming the file, the line, the field and what is wrong with it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    return parse(text, str(path), base=path.parent)


def parse(text: str, name: str = "config", base: Path | None = None) -> Config:
    """Validate configuration text; `name` is what errors call it.

    Raises:
        ConfigError: see `load`.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{name} must be a mapping with at least `pools:`")
    try:
        return Config.model_validate(_absolute(data, base) if base is not None else data)
    except ValidationError as error:
        problems = "\n".join(f"  {_describe(node, problem)}" for problem in error.errors())
        raise ConfigError(f"{name} is not usable:\n{problems}") from error


_PATH_FIELDS = {("model", "path"), ("model", "chat_template"), ("discovery", "file"), ("envoy", "eds_file")}


def _absolute(data: Any, base: Path, section: str = "") -> Any:
    if isinstance(data, list):
        return [_absolute(item, base, section) for item in data]
    if not isinstance(data, dict):
        return data
    out = {}
    for key, value in data.items():
        if (section, key) in _PATH_FIELDS and isinstance(value, str):
            out[key] = str((base / value).resolve())
        else:
            out[key] = _absolute(value, base, str(key))
    return out


def _describe(node: yaml.Node | None, problem: Any) -> str:
    where = problem["loc"]
    line = _line(node, where)
    field = ".".join(str(part) for part in where) or "(top level)"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = "no such setting; check the spelling against the configuration reference"
    elif problem["type"] == "missing":
        message = "this setting is required"
    return f"line {line}: {field}: {message}"


def _line(node: yaml.Node | None, where: tuple[int | str, ...]) -> int:
    """Line of the deepest part of `where` that is in the file."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in where:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
