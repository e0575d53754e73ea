"""Workers behind a Kubernetes Service, by a watch on its EndpointSlices.

kubernetes_asyncio gives credentials (the pod's service account, whose token rotates, or a kubeconfig with its
kinds of login), TLS and the request; it sits on aiohttp, which is here anyway. Its own watch, like that of
other clients, does not find out what was deleted while the server's history was gone: list and watch are
therefore driven by `protocol.endpoint_slices`.

Nothing ends the watch. Of all credentials and certificates the library renews only the service account's
token, and a version may be one that the server cannot go on from although it does not say 410: what fails
again and again is begun anew, from the credentials to the list.
"""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from extproc.adapters.name_resolution import Publish, Report
from extproc.core.errors import ProtocolError, WarmrouteError
from extproc.core.types import Member
from extproc.protocol.endpoint_slices import GONE, SERVICE_LABEL, SliceWatch, WatchState

_log = logging.getLogger("warmroute.kubernetes")

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_PAGE = 500
_CONNECT_S = 5.0
_LIST_S = 30.0
_LOGIN_S = 30.0
_SHORTEST_WATCH_S = 0.5
_ANEW_AFTER = 3  # failures in a row
_MOST_COMPLAINTS = 20  # before the watch works again
_UNREACHED = (aiohttp.ClientError, OSError, ValueError)
_RBAC = {
    401: "check the credentials",
    403: "allow get, list and watch on endpointslices (see deploy/kubernetes)",
}


class KubernetesConfigError(WarmrouteError):
    """The cluster cannot be asked as configured; the message says what to do."""


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Which Service, and how the API server is reached. Times in seconds.

    Attributes:
        service: name of the Service whose pods are the workers.
        namespace: where it is; None: our own, or the kubeconfig's.
        port: number or name of the port; None: the Service's only one.
        kubeconfig: file with cluster and login; None: the pod's service account.
        context: context of the kubeconfig; None: its current one.
        watch_s: a watch is ended by the server, and taken up again, after this.
        silence_s: longest silence of a watch; longer than `watch_s`, it means a dead connection.
        resync_s: the whole list is read again after this, as insurance.
        least_backoff_s: wait after a first failure; doubles up to `most_backoff_s`.
        most_backoff_s: longest wait.
        service_account: folder of the pod's token and CA.
    """

    service: str
    namespace: str | None = None
    port: int | str | None = None
    kubeconfig: Path | None = None
    context: str | None = None
    watch_s: int = 120
    silence_s: float = 150.0
    resync_s: float = 1800.0
    least_backoff_s: float = 0.2
    most_backoff_s: float = 10.0
    service_account: Path = SERVICE_ACCOUNT


@dataclass(frozen=True, slots=True)
class Connection:
    """A way to ask for EndpointSlices: `ask(query)` gives the open response; `namespace` is asked about."""

    namespace: str
    ask: Callable[..., Awaitable[aiohttp.ClientResponse]]
    close: Callable[[], Awaitable[None]]


class KubernetesDiscovery:
    """A source of members (see `adapters.discovery`): the ready pods of a Service.

    Args:
        settings: see `KubernetesSettings`.
        template: describes each member; its endpoint is ignored.
        rng: spreads the retries of several replicas.
    """

    def __init__(
        self, settings: KubernetesSettings, template: Member, rng: random.Random | None = None
    ) -> None:
        self._settings = settings
        self._template = template
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._watch = SliceWatch()
        self._task: asyncio.Task[None] | None = None
        self._errors: dict[str, None] = {}  # reported since the watch last worked
        self._empty = False
        self._gone = False
        self._failures = 0
        self._listed_at = 0.0

    async def start(self, publish: Publish, report: Report) -> None:
        """Connect, and begin to list and watch.

        Raises:
            KubernetesConfigError: the extra is not installed, or there are no credentials.
        """
        connection = await connect(self._settings)
        name = f"watch {connection.namespace}/{self._settings.service}"
        self._task = asyncio.create_task(self._run(connection, publish, report), name=name)

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _run(self, connection: Connection, publish: Publish, report: Report) -> None:
        about = f"Service {connection.namespace}/{self._settings.service}"

        def complain(cause: str) -> None:
            if cause not in self._errors and len(self._errors) < _MOST_COMPLAINTS:
                self._errors[cause] = None
                report(f"{about}: {cause}; the last good list stays")

        def tell() -> None:
            try:
                endpoints = self._watch.endpoints(self._settings.port)
            except ProtocolError as error:
                complain(str(error))
                return
            if len(self._watch) == 0 and not self._empty:
                report(f"{about} has no EndpointSlice: is it the name of a Service in that namespace?")
            self._empty = len(self._watch) == 0
            publish(tuple(replace(self._template, endpoint=endpoint) for endpoint in endpoints))

        try:
            while True:
                failure = await self._step(connection, tell)
                if failure is None:
                    continue
                complain(failure)
                self._failures += 1
                await asyncio.sleep(self._backoff_s())
                if self._failures % _ANEW_AFTER == 0:
                    self._watch.again()
                    fresh = await self._login(complain)
                    if fresh is not None:
                        stale, connection = connection, fresh
                        await stale.close()
        finally:
            await connection.close()

    async def _login(self, complain: Callable[[str], None]) -> Connection | None:
        """Another connection, with the credentials that there are now; None if there are none."""
        try:
            async with asyncio.timeout(_LOGIN_S):  # a kubeconfig may name a program that gives them
                return await connect(self._settings)
        except TimeoutError:
            complain(f"no credentials for the Kubernetes API within {_LOGIN_S:g} s")
        except Exception as error:
            _log.debug("credentials of the Kubernetes API", exc_info=True)
            complain(str(error) or type(error).__name__)
        return None

    async def _step(self, connection: Connection, tell: Callable[[], None]) -> str | None:
        """One list, or one watch to its end. What went wrong, if anything."""
        try:
            if self._watch.state is WatchState.LISTING:
                await self._list(connection)
                tell()
                return None
            return await self._follow(connection, tell)
        except _StatusError as error:
            self._watch.failed(error.code)
            if error.code == GONE and not self._gone:
                self._gone = True  # normal once; again and again, it is not
                return None
            return str(error)
        except ProtocolError as error:
            self._watch.again()
            return str(error)
        except Exception as error:  # the client library has its own, for a login that fails for instance
            _log.debug("watching EndpointSlices", exc_info=True)
            what = "reached" if isinstance(error, _UNREACHED) else "asked"
            return f"the API server cannot be {what}: {error or type(error).__name__}"

    async def _list(self, connection: Connection) -> None:
        items: list[Any] = []
        token = ""
        while True:
            query = {"limit": _PAGE, **({"_continue": token} if token else {})}
            response = await connection.ask(
                **query, _request_timeout=aiohttp.ClientTimeout(total=_LIST_S, sock_connect=_CONNECT_S)
            )
            async with response:
                await _check(response)
                page = json.loads(await response.read())
            metadata = page.get("metadata") if isinstance(page, dict) else None
            if not isinstance(metadata, dict) or not isinstance(page.get("items") or [], list):
                raise ProtocolError("the API server's answer is no list of EndpointSlices")
            items += page.get("items") or []
            token = metadata.get("continue") or ""
            if not token:
                self._watch.listed(items, str(metadata.get("resourceVersion", "")))
                self._listed_at = time.monotonic()
                return

    async def _follow(self, connection: Connection, tell: Callable[[], None]) -> str | None:
        settings, first = self._settings, self._watch.version
        response = await connection.ask(
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=self._watch.version,
            timeout_seconds=settings.watch_s,
            _request_timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_S, sock_read=settings.silence_s
            ),
        )
        opened = time.monotonic()
        async with response:
            await _check(response)
            while line := await response.content.readline():
                if not line.endswith(b"\n"):
                    raise aiohttp.ClientPayloadError("the watch broke off")
                before = self._watch.version
                error = self._watch.event(json.loads(line))
                if error is not None:
                    raise _StatusError(error.code, error.message)
                if self._watch.version != before:
                    self._progress()
                tell()
                if time.monotonic() - self._listed_at >= settings.resync_s:
                    break
        if self._watch.version == first and time.monotonic() - opened < _SHORTEST_WATCH_S:
            return "the watch ends as soon as it begins"
        self._progress()
        if time.monotonic() - self._listed_at >= settings.resync_s:
            self._watch.again()
        return None

    def _progress(self) -> None:
        """The watch works: what fails next is a new failure."""
        self._failures, self._gone = 0, False
        self._errors.clear()

    def _backoff_s(self) -> float:
        settings = self._settings
        wait: float = min(
            settings.most_backoff_s, settings.least_backoff_s * 2.0 ** min(self._failures - 1, 30)
        )
        return wait * self._rng.uniform(0.5, 1.0)


class _StatusError(Exception):
    def __init__(self, code: int, message: str) -> None:
        self.code = code
        hint = _RBAC.get(code)
        super().__init__(f"the API server says {code}: {message}" + (f"; {hint}" if hint else ""))


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    body = await response.read()
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason or "no reason given"
    raise _StatusError(response.status, message)


async def connect(settings: KubernetesSettings) -> Connection:
    """Load credentials and make a client. Nothing is sent yet.

    Raises:
        KubernetesConfigError: see `KubernetesDiscovery.start`.
    """
    try:
        from kubernetes_asyncio import client, config
    except ModuleNotFoundError as error:
        raise KubernetesConfigError(
            "discovery by Kubernetes needs a client library: pip install 'warmroute[kubernetes]'"
        ) from error
    configuration = client.Configuration()
    try:
        if settings.kubeconfig is not None:
            await config.load_kube_config(
                str(settings.kubeconfig), settings.context, configuration, persist_config=False
            )
            default = _context_namespace(config, settings)
        else:
            load: Any = config.load_incluster_config
            load(
                configuration,
                token_filename=str(settings.service_account / "token"),
                cert_filename=str(settings.service_account / "ca.crt"),
            )
            default = (settings.service_account / "namespace").read_text(encoding="utf-8").strip()
    except (config.ConfigException, OSError) as error:
        raise KubernetesConfigError(
            f"no credentials for the Kubernetes API: {error} In a pod, mount its service account token; "
            "elsewhere, name a `kubeconfig`."
        ) from error
    api = client.ApiClient(configuration)
    namespace = settings.namespace or default or "default"
    list_slices: Any = client.DiscoveryV1Api(api).list_namespaced_endpoint_slice

    async def ask(**query: Any) -> aiohttp.ClientResponse:
        response: aiohttp.ClientResponse = await list_slices(
            namespace,
            label_selector=f"{SERVICE_LABEL}={settings.service}",
            _preload_content=False,
            **query,
        )
        return response

    return Connection(namespace, ask, api.close)


def _context_namespace(config: Any, settings: KubernetesSettings) -> str | None:
    contexts, active = config.list_kube_config_contexts(str(settings.kubeconfig))
    for context in contexts:
        if context["name"] == (settings.context or active["name"]):
            namespace: str | None = context["context"].get("namespace")
            return namespace
    return None
