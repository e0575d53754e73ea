"""Prompts to token ids within a time budget, off the event loop where it takes long.

Small prompts are encoded where they arrive; long ones in a few threads, which let processes beside ours do it
where there are any (see `extproc.adapters.prompt_processes`). A request whose ids are not ready
within the budget is routed by load, and its thread finishes in the background: nothing can stop a chat
template that loops, but it occupies one of the threads, never the event loop. When all places are taken,
requests are routed by load at once instead of queueing for ids that would come too late.

Conversations that cannot be rendered here can be sent to a worker to be tokenized, within the same budget.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from extproc.adapters.prompt_process import Elsewhere, PromptProcessError
from extproc.adapters.telemetry.stages import NO_IDS, RENDER, TOKENIZE, WAIT, Stages
from extproc.adapters.worker_tokenizer import WorkerTokenizer, WorkerTokenizerError
from extproc.core.hashing import REMEMBERED, ChainKey
from extproc.prompt.encoder import EncodedPrompt
from extproc.prompt.errors import Unsupported
from extproc.protocol.openai import InferenceRequest, LoadOnly

_log = logging.getLogger(__name__)

# What asking the engine would not help with: it keeps the history, or its cache keys hold more than tokens.
_NOT_FOR_WORKERS = frozenset({"empty-prompt", "multimodal", "prompt-embeds", "stored-history", "suffix"})


class RequestEncoder(Protocol):
    """What the service needs of a `PromptEncoder`."""

    def encode(self, request: InferenceRequest, mark: Callable[[str], None] | None = None) -> EncodedPrompt:
        """Token ids. Raises `Unsupported`. `mark` is told of stages that are over."""
        ...


class Processes(Protocol):
    """What the service needs of a `RemoteEncoder`."""

    @property
    def count(self) -> int:
        """How many prompts can be encoded at one time."""
        ...

    def encode(self, request: InferenceRequest, chain: ChainKey | None) -> Elsewhere | None:
        """Ids and hashes from another process; None: there is none for it now."""
        ...


class PromptService:
    """Encodes requests for one model.

    Args:
        encoder: the model's encoder.
        budget_ms: most time a request may wait for its ids, a worker's answer included.
        inline_bytes: bodies up to this size are encoded on the event loop.
        threads: threads for the others.
        places: encodings running, queued or abandoned at one time; more requests are routed by load.
        worker_tokenizer: asks a worker what cannot be rendered here.
        processes: encode longer ones of what the threads have; None: they do it themselves.
        elsewhere_bytes: bodies beyond this size are encoded in other processes; it takes two to wake up.
    """

    def __init__(
        self,
        encoder: RequestEncoder,
        *,
        budget_ms: float = 200.0,
        inline_bytes: int = 16 << 10,
        threads: int = 2,
        places: int = 64,
        worker_tokenizer: WorkerTokenizer | None = None,
        processes: Processes | None = None,
        elsewhere_bytes: int = 256 << 10,
    ) -> None:
        self._encoder = encoder
        self._budget_s = budget_ms / 1000
        self._inline_bytes = inline_bytes
        self._processes = processes
        self._elsewhere_bytes = elsewhere_bytes
        self._threads = _Threads(max(threads, 0 if processes is None else processes.count), places)
        self._judges = False  # not the first: it pays for what is imported and compiled
        self._worker_tokenizer = worker_tokenizer

    async def encode(
        self,
        request: InferenceRequest,
        watched: Stages | None = None,
        chain: ChainKey | None = None,
    ) -> EncodedPrompt | LoadOnly:
        """Token ids, or why the request is routed by load. Never raises for what a request contains.

        `watched` gets the stages: `wait`, `render` and `tokenize`, or `no-ids`. Long prompts are hashed, too,
        where `chain` is given: on the event loop that would take long.
        """
        watched = watched or Stages(asyncio.get_running_loop().time)
        encoded = await self._encode(request, watched, chain)
        watched.mark(NO_IDS if isinstance(encoded, LoadOnly) else TOKENIZE)
        return encoded

    async def _encode(
        self, request: InferenceRequest, stages: Stages, chain: ChainKey | None
    ) -> EncodedPrompt | LoadOnly:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            if self._is_small(request):
                worked = time.thread_time()  # waiting for a core says nothing about a prompt
                try:
                    return self._encoder.encode(request, stages.mark)
                finally:  # a template that was ended has taken longest
                    self._judge_inline(time.thread_time() - worked)
            return await self._in_thread(request, stages, chain)
        except Unsupported as problem:
            remaining = self._budget_s - (loop.time() - started)
            return await self._ask_worker(request, problem.reason, remaining)
        except PromptProcessError as error:
            _log.warning("%s; a %s request is routed by load", error, request.kind.value)
            return LoadOnly("prompt-error", request.model)
        except Exception:
            _log.exception("encoding a %s request failed; it is routed by load", request.kind.value)
            return LoadOnly("prompt-error", request.model)

    @property
    def idle(self) -> bool:
        """Whether no encoding runs or waits in the threads, also none that was given up."""
        return self._threads.idle

    def close(self) -> None:
        """Start no more encodings. Running ones end by themselves and hold nothing up."""
        self._threads.close()

    def _is_small(self, request: InferenceRequest) -> bool:
        # Template arguments are the one way for a small request to make a template do much.
        return request.size <= self._inline_bytes and "chat_template_kwargs" not in request.body

    def _judge_inline(self, took_s: float) -> None:
        judged, self._judges = self._judges, True
        if judged and took_s > self._budget_s:
            _log.warning(
                "encoding a small prompt took %.0f ms of the event loop; all go to threads from now on",
                took_s * 1000,
            )
            self._inline_bytes = -1

    async def _in_thread(
        self, request: InferenceRequest, stages: Stages, chain: ChainKey | None
    ) -> EncodedPrompt | LoadOnly:
        inside = stages.fork()

        def work() -> EncodedPrompt:
            inside.mark(WAIT)
            found = None
            if self._processes is not None and request.size > self._elsewhere_bytes:
                found = self._processes.encode(request, chain)
            if found is None:
                return _hashed(self._encoder.encode(request, inside.mark), chain)
            if found.encoded_s is not None:
                inside.mark(RENDER, ago_s=found.encoded_s)
            return found.prompt

        job = self._threads.submit(work)
        if job is None:
            return LoadOnly("prompt-busy", request.model)
        result = asyncio.wrap_future(job)
        done, _ = await asyncio.wait({result}, timeout=self._budget_s)
        if not done:
            result.cancel()  # a job that has not begun is dropped; one that has runs on, unheard
            return LoadOnly("prompt-budget", request.model)
        stages.join(inside)
        return result.result()

    async def _ask_worker(
        self, request: InferenceRequest, reason: str, remaining_s: float
    ) -> EncodedPrompt | LoadOnly:
        if self._worker_tokenizer is None or reason in _NOT_FOR_WORKERS:
            return LoadOnly(f"unsupported:{reason}", request.model)
        if remaining_s <= 0:
            return LoadOnly("prompt-budget", request.model)
        try:
            return await self._worker_tokenizer.encode(request, timeout_s=remaining_s)
        except TimeoutError:
            return LoadOnly("prompt-budget", request.model)
        except WorkerTokenizerError as error:
            _log.debug("worker tokenizer: %s", error)
            return LoadOnly(f"unsupported:{reason}", request.model)


def _hashed(encoded: EncodedPrompt, chain: ChainKey | None) -> EncodedPrompt:
    if chain is None:
        return encoded
    hashes = tuple(REMEMBERED.prompt_chain(ids, *chain) for ids in encoded.prompts)
    return EncodedPrompt(encoded.prompts, {chain.block_size: hashes})


_Job = tuple[Future[EncodedPrompt], Callable[[], EncodedPrompt]]


class _Threads:
    """A few daemon threads: unlike an executor's, a runaway one does not keep the process from exiting."""

    def __init__(self, threads: int, places: int) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._free = self._places = places
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"prompt-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], EncodedPrompt]) -> Future[EncodedPrompt] | None:
        """Queue a call; None when every place is taken."""
        with self._lock:
            if not self._free:
                return None
            self._free -= 1
        future: Future[EncodedPrompt] = Future()
        self._jobs.put((future, function))
        return future

    @property
    def idle(self) -> bool:
        return self._free == self._places

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                with self._lock:
                    self._free += 1
            del job, future, function
