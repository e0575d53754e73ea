"""The work of `warmroute analyze`: lines to prompts in processes, results in the log's order."""

import multiprocessing
import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from extproc.adapters.log_files import LogFile
from extproc.analysis.prompts import LineResult, LogClock, PromptReader
from extproc.core.errors import WarmrouteError
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.model_files import ModelFiles
from extproc.prompt.tiny import tiny_model_path
from extproc.prompt.tokenizer import load_tokenizer

if TYPE_CHECKING:  # only --config needs it
    from extproc.config import Pool

_BATCH_BYTES = 512 * 1024
_BATCH_LINES = 1_000
_AHEAD = 3  # batches in work or waiting, per process


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """How prompts become tokens: what `PromptEncoder.load` is told, in every process.

    `note` says it to people; `stand_in`: it is not the tokenizer of their model.
    """

    model_dir: Path
    chat_template: str | None = None
    content_format: Literal["auto", "string", "openai"] = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fast: Literal["auto", "off"] = "auto"
    exclude_tools: bool = False
    note: str = ""
    stand_in: bool = False

    def load(self, clock: LogClock) -> PromptEncoder:
        """The encoder."""
        return PromptEncoder.load(
            self.model_dir,
            chat_template=self.chat_template,
            content_format=self.content_format,
            template_kwargs=self.template_kwargs,
            fast=self.fast,
            exclude_tools_when_tool_choice_none=self.exclude_tools,
            clock=clock,
        )

    def decoder(self) -> Callable[[bytes], str]:
        """Token bytes to text."""
        tokenizer = load_tokenizer(
            self.model_dir, ModelFiles.read(self.model_dir, self.chat_template).tokenizer_config
        )

        def decode(tokens: bytes) -> str:
            ids = array("I")
            ids.frombytes(tokens)
            return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

        return decode


def spec_of(tokenizer: str | None, chat_template: str | None, pool: "Pool | None") -> EncoderSpec:
    """The encoder that the options, or a pool of a configuration, ask for; else the tiny model's.

    Raises:
        WarmrouteError: there is no tokenizer where they point.
    """
    if pool is not None and tokenizer is None and pool.model.path is not None:
        model = pool.model
        return EncoderSpec(
            _directory(str(model.path)),
            chat_template or (None if model.chat_template is None else str(model.chat_template)),
            model.content_format,
            model.template_kwargs,
            model.fast_tokenizer,
            model.exclude_tools_when_tool_choice_none,
            f"Tokenized as pool {pool.name} does.",
        )
    if tokenizer is None:
        return EncoderSpec(
            tiny_model_path(),
            chat_template,
            note="Tokenized with the tiny tokenizer that comes with Warmroute, since no --tokenizer was "
            "given: counts are higher than your model's, shares hold roughly.",
            stand_in=True,
        )
    directory = _directory(tokenizer)
    files = ModelFiles.read(directory, chat_template)
    note = f"Tokenized with {directory.name}."
    if not files.templates and files.chat_unsupported is None:
        chat_template = ModelFiles.read(tiny_model_path(), None).templates["default"]
        note += " It has no chat template, so ChatML stands in; --chat-template names the right one."
    return EncoderSpec(directory, chat_template, note=note)


def _directory(path: str) -> Path:
    place = Path(path)
    if place.is_file() and place.name == "tokenizer.json":
        place = place.parent
    if not (place / "tokenizer.json").is_file():
        raise WarmrouteError(
            f"--tokenizer {path}: there is no tokenizer.json; give the model's folder with "
            "tokenizer.json and tokenizer_config.json (weights are not needed)"
        )
    return place


def read_logs(
    logs: Sequence[LogFile],
    spec: EncoderSpec,
    custom: Mapping[str, str],
    jobs: int,
    progress: Callable[[LogFile, int], None],
) -> Generator[tuple[LogFile, LineResult], None, None]:
    """Every line's result, in order. `progress` is told the log and how many lines were read of it last.

    Raises:
        WarmrouteError: the tokenizer cannot be loaded, or a process died.
    """
    spec.load(LogClock())  # what is wrong with it is to be said here, not by a process
    if jobs <= 1:
        reader = _reader(spec, custom)
        for log, batch in _batches(logs):
            progress(log, len(batch))
            for number, line in batch:
                yield log, reader.read(number, line)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _begin, (spec, dict(custom))) as pool:
        waiting: deque[tuple[LogFile, Future[list[LineResult]]]] = deque()
        try:
            for log, batch in _batches(logs):
                progress(log, len(batch))
                waiting.append((log, pool.submit(_read_batch, batch)))
                if len(waiting) > jobs * _AHEAD:
                    yield from _next(waiting)
            while waiting:
                yield from _next(waiting)
        except BrokenProcessPool:
            raise WarmrouteError("a process that tokenizes died; --jobs 1 does without them") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def default_jobs(logs: Sequence[LogFile]) -> int:
    """Processes worth starting for these logs."""
    sizes = [log.size for log in logs]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) and sum(known) < 8 * 1024 * 1024:
        return 1  # loading the tokenizer in processes would take longer
    return max(1, min(8, os.cpu_count() or 1))


def _next(waiting: deque[tuple[LogFile, Future[list[LineResult]]]]) -> Iterator[tuple[LogFile, LineResult]]:
    log, future = waiting.popleft()
    for result in future.result():
        yield log, result


def _batches(logs: Sequence[LogFile]) -> Iterator[tuple[LogFile, list[tuple[int, bytes]]]]:
    for log in logs:
        batch: list[tuple[int, bytes]] = []
        held = 0
        for number, line in log.lines():
            batch.append((number, line))
            held += len(line)
            if held >= _BATCH_BYTES or len(batch) >= _BATCH_LINES:
                yield log, batch
                batch, held = [], 0
        if batch:
            yield log, batch


def _reader(spec: EncoderSpec, custom: Mapping[str, str]) -> PromptReader:
    clock = LogClock()
    return PromptReader(spec.load(clock), clock, custom)


_process_reader: PromptReader | None = None  # of a process of the pool: what its batches are read with


def _begin(spec: EncoderSpec, custom: Mapping[str, str]) -> None:
    global _process_reader  # noqa: PLW0603 - how a pool hands a process its tools
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _process_reader = _reader(spec, custom)


def _end_with_parent() -> None:
    """A parent that was killed ends no pool."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read_batch(batch: list[tuple[int, bytes]]) -> list[LineResult]:
    assert _process_reader is not None  # noqa: S101 - _begin ran
    return [_process_reader.read(number, line) for number, line in batch]
