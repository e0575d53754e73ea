"""What real vLLM makes of the prompt cases: token ids, asked for live or read from a recording.

`python -m tests.support.engine_ids` records `tests/data/engine_ids.json` (needs WARMROUTE_VLLM_PYTHON): for
the tiny model and its variant with BOS, each case's prompts as [number of tokens, digest of the ids], so that
the default tests can compare without an engine.
"""

import json
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import xxhash

from extproc.prompt.tiny import tiny_model_path
from tests.support.models import make_bos_model_dir
from tests.support.prompt_cases import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body
from tests.support.vllm import MODEL_NAME, Replica, ReplicaSpec, VllmPool, vllm_python

RECORDING = Path(__file__).parents[1] / "data" / "engine_ids.json"
KINDS: dict[str, tuple[str, dict[str, Body]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completion": ("/v1/completions", COMPLETIONS),
    "responses": ("/v1/responses", RESPONSES),
    "messages": ("/v1/messages", MESSAGES),
}
# Render endpoints for what returns no ids, and a tool parser so that tools are accepted as in production.
SERVE_ARGS = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def request_body(kind: str, case: Body) -> Body:
    """The case as a complete request for one output token."""
    limit = "max_output_tokens" if kind == "responses" else "max_tokens"
    return {"model": MODEL_NAME, **case, limit: 1}


def engine_ids(replica: Replica, kind: str, case: Body) -> list[list[int]] | str:
    """Token ids of each prompt, or the engine's error message."""
    path, _ = KINDS[kind]
    body = request_body(kind, case)
    if kind in ("chat", "completion"):
        answer = replica.post(path, {**body, "return_token_ids": True})
        if "error" in answer:
            return str(answer["error"]["message"])
        if kind == "chat":
            return [answer["prompt_token_ids"]]
        return [choice["prompt_token_ids"] for choice in answer["choices"][:: case.get("n", 1)]]
    answer = replica.post(path + "/render", body)
    if "error" in answer:
        return str(answer["error"]["message"])
    return [answer["token_ids"]]


def served_tokens(replica: Replica, kind: str, case: Body) -> int:
    """Prompt tokens that the serving endpoint (not the rendering one) counts."""
    usage = replica.post(KINDS[kind][0], request_body(kind, case))["usage"]
    cached = ("cache_read_input_tokens", "cache_creation_input_tokens")
    return int(usage["input_tokens"]) + sum(usage.get(key) or 0 for key in cached)


def digests(prompts: Iterable[Sequence[int]]) -> list[list[Any]]:
    """Length and digest of each prompt's ids."""
    return [[len(ids), xxhash.xxh3_64_hexdigest(array("I", ids).tobytes())] for ids in prompts]


def main() -> None:
    """Record."""
    with tempfile.TemporaryDirectory() as scratch, VllmPool(vllm_python()) as pool:
        models = {"tiny": tiny_model_path(), "bos": make_bos_model_dir(Path(scratch) / "bos")}
        specs = [ReplicaSpec(model_dir=path, extra_args=SERVE_ARGS) for path in models.values()]
        recording: dict[str, Any] = {"date": date.today().isoformat()}  # noqa: DTZ011  # as the engine does
        for name, replica in zip(models, pool.start(*specs), strict=True):
            recording[name] = {
                kind: {case: digests(engine_ids(replica, kind, body)) for case, body in cases.items()}
                for kind, (_, cases) in KINDS.items()
            }
    RECORDING.parent.mkdir(exist_ok=True)
    RECORDING.write_text(json.dumps(recording, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
