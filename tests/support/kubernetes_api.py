"""A Kubernetes API server for EndpointSlices, over real HTTP: lists in pages, watches, bookmarks, history.

async with KubernetesApi() as api:
    api.put("vllm-abc", ["10.0.0.1", "10.0.0.2"], service="vllm")   # add or change a slice
    api.delete("vllm-abc")
    api.bookmark()             # tell every watch the current version
    api.end_watches()          # end every watch in order, as at its time limit
    api.disconnect()           # cut every watch off, in the middle
    api.forget_history()       # compact: older versions are 410 Gone from now on
    api.refuse = 403           # answer everything with this status
    api.watchable = 200        # answer watches from older versions with status 500
    api.bearer = "another"     # the only token that is good from now on; a new kubeconfig has it
    api.kubeconfig(tmp_path)   # a file to reach it with
    api.lists, api.watches     # how often each was asked for
"""

import asyncio
import contextlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web

BEARER = "a-token"
NAMESPACE = "models"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def endpoint(address: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions or {"ready": True}}


class KubernetesApi:
    def __init__(self, *, page: int | None = None) -> None:
        self.refuse: int | None = None
        self.watchable = 0
        self.bearer = BEARER
        self.gone_as_status = False  # tell of lost history by status instead of by event
        self.lists = 0
        self.watches = 0
        self.open_watches = 0
        self.bookmarks_sent = 0
        self.queries: list[dict[str, str]] = []
        self._page = page
        self.version = 100
        self.oldest = 0
        self._slices: dict[str, dict[str, Any]] = {}
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._epoch = 0
        self._bookmarks = 0
        self._graceful = False
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get(PATH, self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.disconnect()
        assert self._runner is not None
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path, *, namespace: str | None = NAMESPACE) -> Path:
        path = folder / "kubeconfig"
        context = {"cluster": "c", "user": "u", **({"namespace": namespace} if namespace else {})}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": self.bearer}}],
            "contexts": [{"name": "here", "context": context}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    # --- the cluster's state -------------------------------------------------------------------------

    async def put(self, name: str, endpoints: list[Any], *, service: str = "vllm", **fields: Any) -> None:
        known = name in self._slices
        self.version += 1
        self._slices[name] = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": {"kubernetes.io/service-name": service},
                "resourceVersion": str(self.version),
            },
            "addressType": "IPv4",
            "endpoints": [endpoint(one) if isinstance(one, str) else one for one in endpoints],
            "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
            **fields,
        }
        await self._record("MODIFIED" if known else "ADDED", self._slices[name])

    async def delete(self, name: str) -> None:
        self.version += 1
        gone = self._slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        await self._record("DELETED", gone)

    async def bookmark(self) -> None:
        """Something else in the cluster changed; every watch is told the new version."""
        self.version += 1
        self._bookmarks += 1
        await self._wake()

    async def end_watches(self) -> None:
        self._graceful = True
        await self._end()

    async def disconnect(self) -> None:
        self._graceful = False
        await self._end()

    async def _end(self) -> None:
        self._epoch += 1
        await self._wake()

    async def forget_history(self) -> None:
        self.version += 1
        self.oldest = self.version
        self._history.clear()
        await self._wake()

    async def _record(self, kind: str, item: dict[str, Any]) -> None:
        self._history.append((self.version, {"type": kind, "object": json.loads(json.dumps(item))}))
        await self._wake()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- the protocol --------------------------------------------------------------------------------

    async def _get(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.queries.append(query)
        if self.refuse is not None:
            return _status(self.refuse, "the test says so")
        if request.headers.get("authorization") != f"Bearer {self.bearer}":
            return _status(401, "Unauthorized")
        watching = query.get("watch", "").lower() in ("1", "true")
        if watching and int(query["resourceVersion"]) < self.watchable:
            return _status(500, "the test says so")
        return await self._watch(request, query) if watching else self._list(query)

    def _fitting(self, query: dict[str, str]) -> list[dict[str, Any]]:
        key, _, value = query["labelSelector"].partition("=")
        return [one for one in self._slices.values() if one["metadata"]["labels"].get(key) == value]

    def _list(self, query: dict[str, str]) -> web.Response:
        self.lists += 1
        items = self._fitting(query)
        start = int(query.get("continue", "0"))
        size = self._page or int(query.get("limit", "500"))
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if start + size < len(items):
            metadata["continue"] = str(start + size)
        return web.json_response(
            {"kind": "EndpointSliceList", "metadata": metadata, "items": items[start : start + size]}
        )

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        self.watches += 1
        seen, epoch, bookmarks = int(query["resourceVersion"]), self._epoch, self._bookmarks
        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        if seen < self.oldest and self.gone_as_status:
            return web.json_response(gone, status=410)
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        end = asyncio.get_running_loop().time() + float(query["timeoutSeconds"])
        self.open_watches += 1
        try:
            while self._epoch == epoch:
                if seen < self.oldest:
                    await _send(response, {"type": "ERROR", "object": gone})
                    return response
                for version, event in self._history:
                    label = event["object"]["metadata"]["labels"]["kubernetes.io/service-name"]
                    if version > seen and query["labelSelector"].endswith(f"={label}"):
                        await _send(response, event)
                        seen = version
                if bookmarks != self._bookmarks and query.get("allowWatchBookmarks"):
                    seen, bookmarks = self.version, self._bookmarks
                    mark = {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(seen)}}
                    await _send(response, {"type": "BOOKMARK", "object": mark})
                    self.bookmarks_sent += 1
                left = end - asyncio.get_running_loop().time()
                if left <= 0:
                    return response
                try:
                    async with asyncio.timeout(left), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    return response
            if self._graceful:
                return response
            # In the middle of a line, as a connection that breaks.
            with contextlib.suppress(ConnectionError):
                await response.write(b'{"type": "ADDED", "obj')
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.open_watches -= 1
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(json.dumps(event).encode() + b"\n")


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
