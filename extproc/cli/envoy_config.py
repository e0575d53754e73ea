"""`warmroute envoy-config`: the Envoy configuration that fits a Warmroute configuration."""

import argparse
import dataclasses
import sys
from pathlib import Path

import yaml

from extproc import config as configuration
from extproc.adapters.envoy_bootstrap import (
    DEFAULT_PREFIXES,
    BodyMode,
    DnsWorkers,
    EdsFileWorkers,
    EdsServiceWorkers,
    EnvoyConfigError,
    EnvoySettings,
    PoolWorkers,
    RouterTls,
    StaticWorkers,
    Workers,
    bootstrap,
    parse_version,
    to_json,
    to_yaml,
)
from extproc.adapters.holding import MARGIN_S
from extproc.protocol.addresses import parse_address
from extproc.protocol.endpoint_discovery import pool_resource
from extproc.protocol.tenant_identity import attribute_names, namespaces

HELP = "print a complete Envoy configuration for a Warmroute configuration"

# Envoy's own 413 is plain text, so a body somewhat over the limit must reach us to get ours.
_ABOVE_OUR_BODY_LIMIT = 1 << 20
_MAX_MESSAGE_TIMEOUT_S = 60.0
_MOST_BODY_BYTES = (1 << 32) - 1
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = (
        "What no option says is as the section `envoy` of the configuration says. To add Warmroute to an "
        "Envoy or Istio that you run already, see envoy/README.md and deploy/README.md."
    )
    parser.add_argument(
        "-c", "--config", required=True, metavar="FILE", help="Warmroute's configuration file"
    )
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml", help="YAML has comments")
    parser.add_argument("-o", "--output", metavar="FILE", help="write here instead of to standard output")
    parser.add_argument("--envoy-version", metavar="X.Y", help="the Envoy that will read it, 1.36 to 1.40")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where clients connect; port 0 is any free one")
    parser.add_argument("--admin", metavar="HOST:PORT", help="Envoy's admin interface")
    parser.add_argument(
        "--router", action="append", metavar="HOST:PORT", help="where Envoy finds Warmroute; may be repeated"
    )
    parser.add_argument(
        "--worker",
        action="append",
        metavar="HOST:PORT",
        help="a worker, instead of those the file names; may be repeated",
    )
    parser.add_argument(
        "--eds",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let Envoy get the workers from Warmroute over gRPC (by default only where it cannot find them "
        "itself, because an Envoy that starts while Warmroute is down would have no workers)",
    )
    parser.add_argument("--body-mode", choices=[mode.value for mode in BodyMode], help="how bodies reach us")
    parser.add_argument(
        "--first-token-observer",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="report first tokens while they happen",
    )
    parser.add_argument(
        "--trace-collector",
        metavar="HOST:PORT",
        help="OpenTelemetry collector for Envoy's spans (OTLP over gRPC)",
    )
    parser.add_argument(
        "--stream-usage",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="read the usage of streamed answers (a bare scalar as event data crashes Envoy's filter)",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the configuration."""
    if args.eds and args.worker:
        raise EnvoyConfigError("--eds and --worker exclude each other: workers come from one place")
    eds = None if args.eds is None else ("always" if args.eds else "never")
    settings = _overridden(
        envoy_settings(configuration.load(args.config, secrets=False), args.worker, eds), args
    )
    built = bootstrap(settings)
    text = to_json(built) if args.format == "json" else to_yaml(built)
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(args.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvoyConfigError(f"cannot write {args.output}: {error.strerror}") from error
    return 0


def envoy_settings(
    config: configuration.Config, workers: list[str] | None = None, eds: str | None = None
) -> EnvoySettings:
    """What a Warmroute configuration means for Envoy.

    `workers` replaces those it names, `eds` (`auto`, `always`, `never`) its `envoy.eds`.

    Raises:
        EnvoyConfigError: Envoy cannot follow the way the workers are discovered.
        AddressError: an address is not `host:port`.
    """
    envoy = config.envoy
    listen = parse_address(envoy.listen, lowest_port=0)
    admin = parse_address(envoy.admin, lowest_port=0)
    ours = parse_address(config.listen, lowest_port=0)
    ours = ours._replace(host=_ANY_HOST.get(ours.host, ours.host))
    # Each process has a port of its own, so that Envoy balances streams over them, not connections.
    several = range(1, 1 + config.processes) if config.processes > 1 else range(1)
    here = tuple(str(ours._replace(port=ours.port + number)) for number in several)
    if not envoy.router and ours.port == 0:
        raise EnvoyConfigError(
            f"`listen: {config.listen}` leaves the port open, so Envoy cannot find it: "
            "set a port, `envoy.router`, or --router"
        )
    if workers and len(config.pools) > 1:
        raise EnvoyConfigError(
            "--worker cannot say of which pool it is: describe the pools' workers in the file"
        )
    eds = eds or config.envoy.eds
    sources = () if config.tenants is None else config.tenants.sources()
    restricted = [] if config.tenants is None else [*config.tenants.policies.values(), config.tenants.unknown]
    return EnvoySettings(
        workers=StaticWorkers(tuple(workers)) if workers else _workers(config, eds),
        pools=_pools(config, eds),
        named_only=any(tenant is not None and tenant.workers is not None for tenant in restricted),
        fail_open=not config.fail_closed,
        forwarded_namespaces=namespaces(sources),
        request_attributes=attribute_names(sources),
        # Where tenants are restricted no path may go past the router: engines generate on several.
        routed_prefixes=("/",) if config.fail_closed else DEFAULT_PREFIXES,
        routers=tuple(envoy.router) or here,
        router_tls=_router_tls(config),
        listen_address=listen.host,
        listen_port=listen.port,
        admin_address=admin.host,
        admin_port=admin.port,
        envoy_version=parse_version(envoy.version),
        body_mode=BodyMode(envoy.body_mode),
        body_limit=min(config.limits.body_bytes + _ABOVE_OUR_BODY_LIMIT, _MOST_BODY_BYTES),
        message_timeout=envoy.message_timeout_s,
        max_message_timeout=_max_message_timeout(config),
        first_token_observer=envoy.first_token_observer,
        retries=envoy.retries,
        retry_resets=envoy.retry_resets,
        stream_usage=envoy.stream_usage,
        trace_collector=envoy.trace_collector,
        trace_percent=envoy.trace_percent,
    )


def _max_message_timeout(config: configuration.Config) -> float:
    """As long as we may ask to hold a request: Envoy ignores us where we ask for more."""
    return max(_MAX_MESSAGE_TIMEOUT_S, config.admission.max_wait_s + MARGIN_S)


def _router_tls(config: configuration.Config) -> RouterTls | None:
    tls = config.envoy.router_tls
    if tls is None:
        if config.tls is not None:
            raise EnvoyConfigError("with `tls`, Envoy must know our authority: set `envoy.router_tls.ca`")
        return None
    own = (str(path) if path is not None else None for path in (tls.certificate, tls.key))
    return RouterTls(str(tls.ca), tls.name, *own)


def _overridden(settings: EnvoySettings, args: argparse.Namespace) -> EnvoySettings:
    changes: dict[str, object] = {}
    for option, host, port in (
        (args.listen, "listen_address", "listen_port"),
        (args.admin, "admin_address", "admin_port"),
    ):
        if option is not None:
            changes[host], changes[port] = parse_address(option, lowest_port=0)
    if args.envoy_version is not None:
        changes["envoy_version"] = parse_version(args.envoy_version)
    if args.router is not None:
        changes["routers"] = tuple(args.router)
    if args.body_mode is not None:
        changes["body_mode"] = BodyMode(args.body_mode)
    for switch in ("first_token_observer", "stream_usage", "trace_collector"):
        if getattr(args, switch) is not None:
            changes[switch] = getattr(args, switch)
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]  # each is its field's type


def _workers(config: configuration.Config, eds: str) -> Workers:
    """Where Envoy gets its workers; from us where it cannot follow the discovery itself."""
    if eds == "always":
        return EdsServiceWorkers()
    try:
        return _own_workers(config)
    except _CannotFollowError:
        if eds == "never":
            raise
        return EdsServiceWorkers()


def _pools(config: configuration.Config, eds: str) -> tuple[PoolWorkers, ...]:
    """The workers of each of several pools."""
    if len(config.pools) == 1:
        return ()
    found = []
    if config.envoy.eds_file is not None and eds == "never":
        raise EnvoyConfigError(
            "`envoy.eds_file` does not say which worker is of which pool: give each pool a `file`, "
            "or let Warmroute tell Envoy (`envoy.eds: auto`)"
        )
    for pool in config.pools:
        ours = EdsServiceWorkers(pool_resource(pool.name))
        if eds == "always" or config.envoy.eds_file is not None:
            found.append(PoolWorkers(pool.name, ours))
            continue
        try:
            workers = _own_workers(config.model_copy(update={"pools": [pool]}))
        except _CannotFollowError:
            if eds == "never":
                raise
            workers = ours
        found.append(PoolWorkers(pool.name, workers))
    return tuple(found)


class _CannotFollowError(EnvoyConfigError):
    """Envoy has no way to find these workers by itself."""


def _own_workers(config: configuration.Config) -> Workers:
    if config.envoy.eds_file is not None:
        return _watched(config.envoy.eds_file)
    sources = [pool.discovery for pool in config.pools]
    files = list(dict.fromkeys(source.file for source in sources if source.file is not None))
    if any(source.kubernetes is not None for source in sources):
        raise _CannotFollowError(
            "Envoy cannot watch a Kubernetes Service by itself: let Warmroute tell it (`envoy.eds: auto`), "
            "or name workers with --worker"
        )
    names = [source.dns for source in sources if source.dns is not None]
    static = [worker.endpoint for source in sources for worker in source.static]
    if files:
        if len(files) > 1 or names or static:
            raise _CannotFollowError(
                "Envoy can watch one file or resolve names, not both: put all workers into one file "
                "and name it in `envoy.eds_file`, or let Warmroute tell Envoy (`envoy.eds: auto`)"
            )
        return _watched(files[0])
    if len(names) == 1 and not static:
        return DnsWorkers(names[0].name, names[0].port, names[0].interval_s)
    return StaticWorkers(tuple(dict.fromkeys([*static, *(f"{dns.name}:{dns.port}" for dns in names)])))


def _watched(path: Path) -> EdsFileWorkers:
    """The file, if Envoy can read it. One that does not exist yet is taken on trust."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return EdsFileWorkers(str(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EnvoyConfigError(f"cannot read the workers file {path}: {error}") from error
    resources = data.get("resources") if isinstance(data, dict) else None
    if not isinstance(resources, list):
        raise _CannotFollowError(
            f"{path} is not in Envoy's EDS form, so Envoy cannot watch it: write it in that form "
            "(Warmroute reads it too; see envoy/workers.yaml), name workers with --worker, or let Warmroute "
            "tell Envoy (`envoy.eds: auto`)"
        )
    names = [one.get("cluster_name", one.get("clusterName")) for one in resources if isinstance(one, dict)]
    if "workers" in names or len(names) != 1 or not names[0]:
        return EdsFileWorkers(str(path))
    return EdsFileWorkers(str(path), assignment=names[0])
