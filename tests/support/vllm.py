"""Real vLLM replicas on the CPU, for tests.

`WARMROUTE_VLLM_PYTHON` names the Python of an environment made by `.ci/install-vllm.sh`. One helper process
imports vLLM and forks the replicas (`vllm_zygote.py`), which makes several start in the time of one:

    with VllmPool(vllm_python()) as pool:
        a, b = pool.start(ReplicaSpec(), ReplicaSpec(num_gpu_blocks_override=64))
        ...
        a.kill(); a.restart()

Ports are ours before the engine starts and stay reserved until the pool ends: bound, never listening, and
with SO_REUSEADDR, which on Linux lets the engine listen on them and nobody else take them by chance.
"""

import contextlib
import http.client
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from extproc.prompt.tiny import tiny_model_path

BLOCK_SIZE = 32
MODEL_NAME = "tiny"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.05
LOG_TAIL = 3000


class VllmUnavailableError(Exception):
    """There is no real vLLM to test with; the message says how to get one."""


class VllmStartError(Exception):
    """A replica did not come up; the message ends with its log."""


def vllm_python() -> str:
    """The Python of the engine's environment.

    Raises:
        VllmUnavailableError: `WARMROUTE_VLLM_PYTHON` is unset or names nothing that runs.
    """
    value = os.environ.get("WARMROUTE_VLLM_PYTHON")
    if not value:
        raise VllmUnavailableError(
            "WARMROUTE_VLLM_PYTHON is not set: install real vLLM with `.ci/install-vllm.sh DIR`"
            " and set it to DIR/bin/python"
        )
    if not os.access(value, os.X_OK):
        raise VllmUnavailableError(f"WARMROUTE_VLLM_PYTHON={value} is not an executable")
    return value


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """How one replica is started. Sizes are tokens or blocks; `extra_args` are added to `vllm serve`.

    `max_model_len` is lowered to what `num_gpu_blocks_override` blocks hold.
    """

    model_dir: Path = field(default_factory=tiny_model_path)
    served_model_name: str = MODEL_NAME
    block_size: int = BLOCK_SIZE
    max_model_len: int = 16_384
    max_num_seqs: int = 16
    num_gpu_blocks_override: int | None = None
    kv_events: bool = True
    extra_args: Sequence[str] = ()

    def arguments(self, name: str, port: int, kv_port: int, replay_port: int) -> list[str]:
        """Arguments of `vllm serve`."""
        arguments = [
            str(self.model_dir),
            *("--served-model-name", self.served_model_name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--load-format", "dummy", "--enforce-eager"),
            *("--max-model-len", str(self._model_len()), "--max-num-seqs", str(self.max_num_seqs)),
            *("--block-size", str(self.block_size), "--kv-cache-memory-bytes", "64M"),
            "--enable-prompt-tokens-details",
        ]
        if self.num_gpu_blocks_override is not None:
            arguments += ["--num-gpu-blocks-override", str(self.num_gpu_blocks_override)]
        if self.kv_events:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{kv_port}",  # a wildcard makes the engine bind, an address connect
                "replay_endpoint": f"tcp://127.0.0.1:{replay_port}",
                "topic": f"kv@{name}@{self.served_model_name}",
            }
            arguments += ["--kv-events-config", json.dumps(events)]
        return [*arguments, *self.extra_args]

    def _model_len(self) -> int:
        # The engine refuses to start if one request of full length would not fit its cache.
        if self.num_gpu_blocks_override is None:
            return self.max_model_len
        return min(self.max_model_len, (self.num_gpu_blocks_override - 1) * self.block_size)  # one is null


class Replica:
    """One running `vllm serve`.

    `endpoint` is `ip:port`; `kv_events` and `kv_replay` are ZMQ endpoints to connect to. `restart` keeps all
    of them.
    """

    def __init__(self, pool: "VllmPool", name: str, spec: ReplicaSpec, log: Path) -> None:
        self._pool = pool
        self._sockets = [_reserve("127.0.0.1"), _reserve("127.0.0.1"), _reserve("")]
        self._port, replay_port, kv_port = (sock.getsockname()[1] for sock in self._sockets)
        self.name = name
        self.spec = spec
        self.log = log
        self.model_dir = spec.model_dir
        self.endpoint = f"127.0.0.1:{self._port}"
        self.base_url = f"http://{self.endpoint}"
        self.kv_events = f"tcp://127.0.0.1:{kv_port}"
        self.kv_replay = f"tcp://127.0.0.1:{replay_port}"
        self.arguments = spec.arguments(name, self._port, kv_port, replay_port)
        self.pid: int | None = None
        self.exited = threading.Event()

    def __repr__(self) -> str:
        return f"<Replica {self.name} {self.endpoint} pid={self.pid}>"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """One HTTP request, its status and its whole body. `body` is sent as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a JSON request, whatever its status."""
        return json.loads(self.request("POST", path, body)[1] or b"null")

    def healthy(self) -> bool:
        """Whether `/health` answers 200 now."""
        try:
            return self.request("GET", "/health")[0] == http.client.OK
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL server and engine core at once, as a crash would, and wait until they are gone."""
        if self.pid is not None and not self.exited.is_set():
            _signal_group(self.pid, signal.SIGKILL)
            if not self.exited.wait(STOP_TIMEOUT_S):
                raise VllmStartError(f"{self!r} did not die")
        self.pid = None

    def restart(self, *, wait: bool = True) -> None:
        """Start again on the same ports, with an empty cache. Call `kill` first."""
        assert self.pid is None, "kill it first"
        self._pool._launch([self])
        if wait:
            self._pool.wait_healthy([self])

    def log_tail(self) -> str:
        """The end of what the engine printed."""
        return self.log.read_text(errors="replace")[-LOG_TAIL:] if self.log.exists() else "(no log)"

    def _release_ports(self) -> None:
        for sock in self._sockets:
            sock.close()


class VllmPool:
    """Owns the forking process and every replica it started. A context manager; leaves nothing behind."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._replicas: dict[str, Replica] = {}
        self._started: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="wr-vllm-"))
        with (self.directory / "zygote.log").open("wb") as log:
            self._process = subprocess.Popen(
                # -P: beside the script lies this module, which is called vllm as well.
                [self.python, "-P", str(Path(__file__).with_name("vllm_zygote.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self.directory),
                cwd=self.directory,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read_events, name="vllm-zygote", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()  # the zygote ends its replicas
            self._process.wait(STOP_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            for replica in self._replicas.values():
                if replica.pid is not None and not replica.exited.is_set():
                    _signal_group(replica.pid, signal.SIGKILL)
                replica._release_ports()
            # The zygote is gone, so whatever keeps its output open is a process we have just killed.
            self._reader.join(STOP_TIMEOUT_S)
            self._process.stdout.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def start(self, *specs: ReplicaSpec, wait: bool = True) -> list[Replica]:
        """Start one replica per spec, side by side, and wait until all are healthy.

        Raises:
            VllmStartError: one exited, or was not healthy in time; the message has its log.
        """
        replicas = []
        for spec in specs:
            name = f"r{len(self._replicas)}"
            replica = Replica(self, name, spec, self.directory / f"{name}.log")
            self._replicas[name] = replica
            replicas.append(replica)
        self._launch(replicas)
        if wait:
            self.wait_healthy(replicas)
        return replicas

    @contextlib.contextmanager
    def plain(self, spec: ReplicaSpec) -> Iterator[Replica]:
        """One replica started as users start it, without the forking process; it ends with the context."""
        name = f"plain{len(self._replicas)}"
        replica = Replica(self, name, spec, self.directory / f"{name}.log")
        self._replicas[name] = replica
        with replica.log.open("wb") as log:
            process = subprocess.Popen(
                [self.python, "-m", "vllm.entrypoints.cli.main", "serve", *replica.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self.directory),
                cwd=self.directory,
                start_new_session=True,
            )
        replica.pid = process.pid
        watcher = threading.Thread(target=lambda: (process.wait(), replica.exited.set()), daemon=True)
        watcher.start()
        try:
            self.wait_healthy([replica])
            yield replica
        finally:
            replica.kill()
            watcher.join(STOP_TIMEOUT_S)

    def wait_healthy(self, replicas: Sequence[Replica], timeout_s: float = START_TIMEOUT_S) -> None:
        """Poll `/health` until every replica answers.

        Raises:
            VllmStartError: as `start`.
        """
        deadline = time.monotonic() + timeout_s
        for replica in replicas:
            while not replica.healthy():
                if replica.exited.is_set() or self._process.poll() is not None:
                    raise VllmStartError(f"{replica!r} exited while starting:\n{replica.log_tail()}")
                if time.monotonic() > deadline:
                    raise VllmStartError(
                        f"{replica!r} not healthy after {timeout_s:.0f} s:\n{replica.log_tail()}"
                    )
                time.sleep(POLL_S)

    def _launch(self, replicas: Sequence[Replica]) -> None:
        assert self._process.stdin is not None
        for replica in replicas:
            replica.exited = threading.Event()
            command = {"id": replica.name, "args": replica.arguments, "log": str(replica.log)}
            try:
                self._process.stdin.write((json.dumps(command) + "\n").encode())
                self._process.stdin.flush()
            except BrokenPipeError:
                raise VllmStartError(self._zygote_log()) from None
        for _ in replicas:
            try:
                event = self._started.get(timeout=START_TIMEOUT_S)
            except queue.Empty:
                raise VllmStartError(f"vLLM could not be imported in time:\n{self._zygote_log()}") from None
            if event["event"] == "gone":
                raise VllmStartError(f"vLLM could not be imported:\n{self._zygote_log()}")
            self._replicas[event["id"]].pid = event["pid"]

    def _zygote_log(self) -> str:
        return (self.directory / "zygote.log").read_text(errors="replace")[-LOG_TAIL:]

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # vLLM prints while it is imported
            if event["event"] == "started":
                self._started.put(event)
            elif event["event"] == "exited":
                self._replicas[event["id"]].exited.set()
        for replica in self._replicas.values():
            replica.exited.set()
        self._started.put({"event": "gone"})


def _reserve(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _environment(directory: Path) -> dict[str, str]:
    """What the engine needs to run offline, on loopback, in one thread, leaving files only in `directory`."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_"))},
        "CUDA_VISIBLE_DEVICES": "",
        "DO_NOT_TRACK": "1",
        "HF_HOME": str(directory / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(directory),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "VLLM_CONFIG_ROOT": str(directory / "vllm-config"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "XDG_CACHE_HOME": str(directory / "cache"),
    }
