"""How the demo runs a real vLLM replica of the tiny model on a CPU."""

import json
import os
import socket
from pathlib import Path

from extproc.prompt.tiny import tiny_model_path

CPU_BLOCK_SIZE = 32  # vLLM's CPU backend takes multiples of 32 only


def build(python: str, directory: Path, blocks: int) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of one replica whose cache holds `blocks` blocks of 32 tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    port, events, replay = _free_ports(3)
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "",
    }
    command = [
        *(python, "-m", "vllm.entrypoints.cli.main", "serve", str(tiny_model_path())),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--load-format", "dummy", "--enforce-eager"),
        *("--max-model-len", "8192", "--max-num-seqs", "16"),
        *("--enable-prompt-tokens-details", "--distributed-executor-backend", "uni"),
        *("--kv-cache-memory-bytes", "64M", "--block-size", str(CPU_BLOCK_SIZE)),
        *("--num-gpu-blocks-override", str(blocks)),
        *("--kv-events-config", json.dumps(kv_events)),
    ]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_CONFIG_ROOT": str(directory / "config"),
    }
    return command, environment


def endpoints(command: list[str]) -> tuple[str, str, str]:
    """(ip:port, KV events, KV replay) of a replica started with `command`."""
    port = command[command.index("--port") + 1]
    kv_events = json.loads(command[command.index("--kv-events-config") + 1])
    events, replay = (kv_events[key].replace("*", "127.0.0.1") for key in ("endpoint", "replay_endpoint"))
    return f"127.0.0.1:{port}", events, replay


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
