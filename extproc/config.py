"""Configuration: one YAML (or JSON) file, read once, validated with errors that name line and fix."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from extproc.adapters.policy_plugins import available_policies
from extproc.core.cost import CostSettings
from extproc.core.errors import WarmrouteError
from extproc.core.router import RouterSettings

Seconds = Annotated[float, Field(gt=0)]


def _known_policy(name: str) -> str:
    known = available_policies()
    if name not in known:
        raise ValueError(f"there is no policy {name!r}; choose from {', '.join(known)}")
    return name


PolicyName = Annotated[str, AfterValidator(_known_policy)]


class ConfigError(WarmrouteError):
    """The configuration cannot be used; the message says where and why."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KvEvents(_Section):
    """Where a pool's engines publish KV events. `*` or no host means the worker's own host."""

    enabled: bool = Field(default=True, description="subscribe to KV events")
    endpoint: str = Field("tcp://*:5557", description="ZMQ PUB endpoint of data-parallel rank 0")
    replay: str | None = Field("tcp://*:5558", description="ZMQ replay endpoint of rank 0; null: no replay")
    bind: bool = Field(default=False, description="the engines connect to us; `endpoint` is our address")
    topic: str = Field("", description="ZMQ topic prefix to subscribe to")


class Dns(_Section):
    """Workers behind a DNS name; every address it resolves to is a worker."""

    name: str = Field(description="host name, resolved by the system")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(description="port of every worker")
    interval_s: Seconds = Field(5.0, description="seconds between resolutions")


class StaticWorker(_Section):
    """One engine server, with its own KV endpoints where they differ from the pool's."""

    endpoint: str = Field(description="`host:port`")
    dp_size: Annotated[int, Field(ge=1)] | None = Field(None, description="null: as the pool says")
    kv_events: str | None = Field(None, description="its own KV event endpoint")
    kv_replay: str | None = Field(None, description="its own replay endpoint")


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

    interval_s: Seconds = Field(1.0, description="seconds between scrapes of one worker")
    timeout_s: Seconds = Field(2.0, description="longest a scrape may take")
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
    content_format: Literal["auto", "string", "openai"] = Field(
        "auto", description="as the engine's --chat-template-content-format"
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="as the engine's --default-chat-template-kwargs"
    )
    fast_tokenizer: Literal["auto", "off"] = Field(
        "auto", description="use fastokens if installed and its ids agree with tokenizers at load"
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=False, description="as the engine's flag of that name"
    )
    worker_tokenize: Literal["off", "tokenize", "render"] = Field(
        "off", description="ask a worker (its /tokenize or /render) where local rendering is not supported"
    )


class Pool(_Section):
    """A set of workers serving one base model."""

    name: str = Field("default", description="what logs call it")
    model: Model = Field(default_factory=Model)
    discovery: Discovery
    dp_size: Annotated[int, Field(ge=1)] = Field(1, description="data-parallel ranks behind each endpoint")
    kv_events: KvEvents = Field(default_factory=KvEvents)
    block_size: Annotated[int, Field(ge=1)] | None = Field(
        None, description="tokens per KV block until an engine tells; null: claim nothing until then"
    )


_COST = CostSettings()


class Cost(_Section):
    """Coefficients of the cost model; see `extproc/core/cost.py` for the formula."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = Field(
        _COST.prefill_tokens_per_s, description="prefill rate of a worker until it is learned"
    )
    overhead_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.overhead_ms,
        description="time to first token of an empty prompt on an idle worker until learned",
    )
    attention_ms_per_mpair: Annotated[float, Field(ge=0)] = Field(
        _COST.attention_ms_per_mpair,
        description="ms per million (token, earlier token) pairs of a prefill until learned",
    )
    reload_tokens_per_s: Annotated[float, Field(gt=0)] = Field(
        _COST.reload_tokens_per_s, description="rate at which offloaded KV comes back to the GPU"
    )
    step_ms_per_sequence: Annotated[float, Field(ge=0)] = Field(
        _COST.step_ms_per_sequence, description="what one more sequence adds to a decode step"
    )
    step_ms_per_1k_context: Annotated[float, Field(ge=0)] = Field(
        _COST.step_ms_per_1k_context, description="what 1,000 more tokens of context add to a decode step"
    )
    interference: Annotated[float, Field(ge=0)] = Field(
        _COST.interference,
        description="share of our prefill by which each running sequence, and the next to come, is delayed",
    )
    expected_output_tokens: Annotated[float, Field(gt=0)] = Field(
        _COST.expected_output_tokens, description="generated tokens per request until learned"
    )
    eviction: Annotated[float, Field(ge=0)] = Field(
        _COST.eviction, description="how much of the expected loss by eviction is charged to who evicts"
    )
    tie_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.tie_ms, description="costs closer than this (or than 2 %) are equal"
    )
    max_extra_ttft_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.max_extra_ttft_ms,
        description="a warm worker may be this much worse in predicted TTFT than the best cold one",
    )
    max_warm_wait_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.max_warm_wait_ms, description="with a longer queue, warmth does not count against a faster one"
    )

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

    listen: str = Field("0.0.0.0:10000", description="where clients connect")
    admin: str = Field("127.0.0.1:9901", description="Envoy's admin interface")
    router: list[str] = Field(default_factory=list, description="where Envoy finds us; default: `listen`")
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
    eds_file: Path | None = Field(
        None, description="worker list for Envoy; null: as the pools' discovery says"
    )


class Config(_Section):
    """Everything `warmroute serve` needs."""

    listen: str = Field("127.0.0.1:50051", description="gRPC address for Envoy: ext_proc, access log, health")
    pools: Annotated[list[Pool], Field(min_length=1)]
    policy: PolicyName = Field("token-load", description="see policies above; packages can add some")
    shadow: list[PolicyName] = Field(
        default_factory=list, description="policies whose choice is logged beside, and never acted on"
    )
    policy_header: str | None = Field(
        None, description="request header that may choose the policy; null: none may"
    )
    session_header: str = Field(
        "x-session-id", description="request header that names the session, for session-affinity"
    )
    fallbacks: Annotated[int, Field(ge=1)] = Field(3, description="endpoints named per request, in order")
    seed: int | None = Field(None, description="seed of the tie-breaks; null: random")
    test_mode: bool = Field(default=False, description="honour conformance test headers; never in production")
    cost: Cost = Field(default_factory=Cost)
    scrape: Scrape = Field(default_factory=Scrape)
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
        return self

    def router_settings(self) -> RouterSettings:
        """The core's form of the settings."""
        return RouterSettings(
            stale_after_s=self.scrape.stale_after_s,
            failure_limit=self.scrape.failure_limit,
            lease_expiry_s=self.limits.lease_expiry_s,
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
