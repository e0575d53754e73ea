"""Import vLLM once, then fork one real `vllm serve` per command. Runs under the engine's own Python.

Reads one JSON object a line on standard input, `{"id": str, "args": [str], "log": path}`, and writes one a
line on standard output: `{"event": "ready"}`, `{"event": "started", "id", "pid"}`, `{"event": "exited", "id",
"pid", "status"}`. Each replica leads a session of its own, so its engine core dies with its group. End of
input ends every replica, whatever became of the parent.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time

# What every replica imports on its way up. A name that a version lacks costs time, not correctness.
PRELOAD = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.cli.benchmark.main",
    "vllm.entrypoints.cli.launch",
    "vllm.entrypoints.cli.openai",
    "vllm.entrypoints.cli.run_batch",
    "vllm.entrypoints.cli.preload",
    "vllm.entrypoints.cli.snapshot",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.entrypoints.anthropic.serving",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader",
    "vllm.renderers.hf",
    "transformers.models.qwen2.tokenization_qwen2",
    "transformers.models.qwen2.configuration_qwen2",
    "transformers.models.llama.configuration_llama",
    "uvicorn",
    "msgspec",
    "zmq",
    "xgrammar",
)
POLL_S = 0.1
GRACE_S = 5.0


def tell(**message):
    os.write(1, (json.dumps(message) + "\n").encode())


def fork_not_spawn():
    """Let each API server fork its engine core: the CPU platform insists on spawn."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls, config):
        original(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(check_and_update_config)


def serve(command):
    """Become one replica. Never returns."""
    status = 1
    try:
        os.setsid()
        log = os.open(command["log"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["vllm", "serve", *command["args"], "--distributed-executor-backend", "uni"]
        from vllm.entrypoints.cli.main import main

        main()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def signal_groups(replicas, number):
    for pid in replicas:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


def reap(replicas):
    while replicas:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        name = replicas.pop(pid, None)
        if name is not None:
            signal_groups([pid], signal.SIGKILL)  # an engine core that outlived its server
            tell(event="exited", id=name, pid=pid, status=status)


def main():
    for module in PRELOAD:
        try:
            importlib.import_module(module)
        except Exception as error:
            tell(event="not-preloaded", module=module, error=repr(error)[:200])
    fork_not_spawn()
    tell(event="ready")
    replicas = {}
    pending = b""
    while True:
        reap(replicas)
        if not select.select([0], [], [], POLL_S)[0]:
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            pid = os.fork()
            if pid == 0:
                serve(command)
            replicas[pid] = command["id"]
            tell(event="started", id=command["id"], pid=pid)
    signal_groups(replicas, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while replicas and time.monotonic() < deadline:
        reap(replicas)
        time.sleep(POLL_S)
    signal_groups(replicas, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; end of input is our cue
    # The reading end of standard output may be gone before we are.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    main()
