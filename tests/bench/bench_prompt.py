"""What a long prompt costs by stage, known or not: `python -m tests.bench.bench_prompt`.

Sessions of about 100,000 tokens grow by 2 KB of text a turn: as many messages, or as one that gets longer.
Each turn is rendered in jinja2's own sandbox and in ours, and encoded whole and incrementally, one after the
other, so that all meet the same noise. Ids must be equal. Real tokenizers are taken from
WARMROUTE_TOKENIZERS_DIR. Times are medians in milliseconds, by the wall clock and of the processor.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.encoders import Encoder, choose_encoder
from extproc.prompt.errors import Unsupported
from extproc.prompt.messages import conversation
from extproc.prompt.tiny import tiny_model_path
from extproc.protocol.openai import InferenceRequest, parse_request

START, TURN, TURNS, FIRSTS = 400_000, 2_000, 25, 8
OWN = "render, jinja2's own sandbox"
ROOT = Path(__file__).parents[2]


class Times:
    """Times by name; printed beside each other."""

    def __init__(self) -> None:
        self._wall: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}

    def of(self, name: str, run: Callable[[], Any]) -> Any:
        """Run and remember."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = run()
        self._cpu.setdefault(name, []).append(time.process_time() - cpu)
        self._wall.setdefault(name, []).append(time.perf_counter() - wall)
        return result

    def print(self) -> None:
        """One line a name."""
        for name, walls in self._wall.items():
            wall, cpu = statistics.median(walls) * 1e3, statistics.median(self._cpu[name]) * 1e3
            print(f"    {name:30s} wall {wall:8.3f}, at best {min(walls) * 1e3:8.3f}   cpu {cpu:8.3f}")

    def ratio(self, one: str, other: str) -> str:
        """Processor time of `one` as a part of `other`."""
        return f"{statistics.median(self._cpu[one]) / statistics.median(self._cpu[other]):.2f}"


def texts() -> Iterator[str]:
    """Prose and code without end: this repository's, in turns of another place each."""
    source = "\n".join(path.read_text() for path in sorted(ROOT.glob("**/*.md")) if ".venv" not in path.parts)
    source += "\n".join(path.read_text() for path in sorted((ROOT / "extproc").glob("**/*.py")))
    random = Random(1)
    while True:
        begin = random.randrange(len(source) - TURN)
        yield source[begin : begin + TURN]


def bodies(source: Iterator[str], *, many: bool) -> Iterator[bytes]:
    """A session's requests, turn by turn."""
    messages = [{"role": "system", "content": next(source)}]
    while True:
        if not many and len(messages) > 1:
            messages[1]["content"] += next(source)
        else:
            messages.append({"role": ("assistant", "user")[len(messages) % 2], "content": next(source)})
        if sum(len(message["content"]) for message in messages) >= START:
            yield json.dumps({"model": "m", "messages": messages}).encode()


def parsed(body: bytes) -> InferenceRequest:
    """A chat request as it comes."""
    request = parse_request("POST", "/v1/chat/completions", {}, body)
    if not isinstance(request, InferenceRequest):
        raise TypeError(request)
    return request


def plain_renderer(prompts: PromptEncoder) -> Callable[[InferenceRequest], str] | None:
    """The same template in jinja2's own sandbox; None for one that needs more than that."""
    template = prompts.templates["default"]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["strftime_now"] = datetime.now().astimezone().strftime
    compiled = environment.from_string(template.source)

    def render(request: InferenceRequest) -> str:
        messages = conversation(request.body["messages"], template.content_format)
        return compiled.render(messages=messages, add_generation_prompt=True, **prompts._special)

    return render


def session(prompts: PromptEncoder, whole: Encoder, *, many: bool) -> None:
    """One growing session."""
    times, plain = Times(), plain_renderer(prompts)
    turns = bodies(texts(), many=many)
    tokens = 0
    for number in range(TURNS):
        body = next(turns)
        request = times.of("parse", lambda body=body: parsed(body))
        theirs = times.of(OWN, lambda request=request: plain(request))
        text = times.of("render", lambda request=request: prompts.render(request))
        if text != theirs:
            raise AssertionError("rendered differently")
        again = times.of("encode, whole", lambda text=text: whole.encode(text, add_special_tokens=False))
        run = lambda text=text: prompts.encoder.encode(text, add_special_tokens=False)  # noqa: E731
        ids = times.of("encode, first turn" if number == 0 else "encode, later turns", run)
        if ids != again:
            raise AssertionError("encoded differently")
        tokens = len(ids)
    print(f"  {'many messages' if many else 'one long message'}: {len(text):,} characters, {tokens:,} tokens")
    times.print()
    print(
        f"    later turns / whole: {times.ratio('encode, later turns', 'encode, whole')};"
        f" our sandbox / jinja2's own: {times.ratio('render', OWN)} (processor time)"
    )


def first_encodes(prompts: PromptEncoder, whole: Encoder) -> None:
    """Texts never seen: what looking them up in vain, and remembering them, adds."""
    times, source = Times(), texts()
    for number in range(2 * FIRSTS):
        text = "".join(f"{next(source)}{number}" for _ in range(START // TURN))
        pair = [("never seen, whole", whole), ("never seen, incremental", prompts.encoder)]
        for name, encoder in pair if number % 2 else reversed(pair):
            times.of(name, lambda encoder=encoder: encoder.encode(text, add_special_tokens=False))  # noqa: B023
    print(f"  {FIRSTS * 2} texts of {START:,} characters never seen before")
    times.print()


def main() -> None:
    """Print all figures."""
    folder = os.environ.get("WARMROUTE_TOKENIZERS_DIR")
    models = {"tiny": tiny_model_path()}
    models |= {
        path.parent.name: path.parent for path in sorted(Path(folder or "/nowhere").glob("*/tokenizer.json"))
    }
    for name, path in models.items():
        for fast in ("auto", "off"):
            if fast == "off" and name != "tiny":
                continue
            prompts = PromptEncoder.load(path, fast=fast, clock=datetime.now)
            whole = choose_encoder(prompts._tokenizer, fast=fast == "auto", cache_bytes=0)
            print(f"{name}, {prompts.encoder.name}: reuse {prompts.encoder.reuse}")
            for many in (True, False):
                try:
                    session(prompts, whole, many=many)
                except Unsupported as problem:
                    print(f"  not rendered: {problem}")
            if fast == "auto":
                first_encodes(prompts, whole)


if __name__ == "__main__":
    main()
