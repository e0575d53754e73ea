"""Records what a router is told, while it is told.

Theory of operation
-------------------
A router is deterministic: its decisions follow from how it was built, from the calls that change it
(`INPUTS`) with their arguments, and from nothing else. The recorder replaces those methods, on this one
router, by ones that write each call down after it was made; calls that the router makes of itself follow from
the others, and are not written.

Token ids are not written, because they would tell prompts. The router asks the recorder for hashes, of the
blocks of requests and of KV events; it computes them as ever, and writes down what they were.

Recording must not harm routing: when anything about it fails, it ends, says so once, and the router goes on.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from extproc.core.candidates import prompt_hashes
from extproc.core.errors import NoEndpointError
from extproc.core.kv_chain import event_chain
from extproc.core.policies.session_affinity import session_hash
from extproc.core.router import Router
from extproc.core.types import BlockStored, Decision, RoutingRequest
from extproc.journal import values
from extproc.journal.decisions import summary
from extproc.journal.symbols import SymbolWriter

INPUTS = (
    "schedule",
    "release",
    "tick",
    "on_first_token",
    "on_progress",
    "on_stream_ended",
    "on_served",
    "on_access_log",
    "on_membership",
    "on_kv_events",
    "on_kv_reset",
    "on_kv_trust",
    "on_kv_suspended",
    "on_metrics",
    "on_scrape_failure",
    "on_models",
    "on_peer_news",
    "on_kv_restored",
    "on_left_early",
    "on_kv_heard",
    "on_page_failure",
)
"""Methods of `Router` that change it. An entry names its method by its place here: add at the end."""

READS = frozenset({"block_size", "destinations", "eligible", "quote", "tell", "unfinished"})
"""Methods of `Router` that change nothing."""

Entry = list[Any]
"""[place in `INPUTS`, argument values in order, what was hashed meanwhile, what was decided].

The last two are there only where such a thing can be.
"""


class Recorder:
    """Writes a router's inputs.

    Args:
        write: takes each entry; whatever it raises ends the recording.
        on_error: told once when the recording ends before its time.
    """

    def __init__(self, write: Callable[[Entry], None], on_error: Callable[[str], None]) -> None:
        self._write = write
        self._on_error = on_error
        self._symbols = SymbolWriter()
        self._events: values.EventHashes = []
        self._prompts: values.PromptHashes = {}
        self._router: Router | None = None
        self._inside = False

    @property
    def recording(self) -> bool:
        """Whether anything is written."""
        return self._router is not None

    def event_hashes(
        self, event: BlockStored, parent: int | None, model_revision: str, tokenizer_revision: str
    ) -> list[int] | None:
        """What the recorded router must be given as its `event_hashes`."""
        found = event_chain(event, parent, model_revision, tokenizer_revision)
        if self._inside:
            self._events.append((event.block_hashes, found))
        return found

    def prompt_hashes(self, request: RoutingRequest, size: int) -> tuple[tuple[int, ...], ...]:
        """What the recorded router must be given as its `prompt_hashes`."""
        found = prompt_hashes(request, size)
        if self._inside:
            self._prompts[request.namespace.model_revision, size] = found
        return found

    def attach(self, router: Router) -> None:
        """Record `router` from now on; it must not have been told anything yet."""
        self._router = router
        for place, name in enumerate(INPUTS):
            setattr(router, name, self._recorded(place, getattr(router, name)))

    def stop(self) -> None:
        """Record nothing more."""
        if self._router is not None:
            for name in INPUTS:
                vars(self._router).pop(name, None)
        self._router = None

    def _recorded(self, place: int, method: Callable[..., Any]) -> Callable[..., Any]:
        names = tuple(values.parameters(method))
        order = tuple(inspect.signature(method).parameters)
        iterables = _iterables(method)
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(method).parameters.items()
            if parameter.default is not parameter.empty
        }

        @functools.wraps(method)
        def recorded(*given: Any, **named: Any) -> Any:
            if self._inside or self._router is None:
                return method(*given, **named)
            arguments = defaults | dict(zip(order, given, strict=False)) | named
            for name in iterables:
                arguments[name] = tuple(arguments[name])
            packed = self._pack(names, arguments)
            self._inside = True
            result: Any = None
            try:
                result = method(**arguments)
            except NoEndpointError as error:
                result = error
                raise
            finally:
                self._inside = False
                self._note(place, packed, result)
            return result

        return recorded

    def _pack(self, names: Iterable[str], arguments: Mapping[str, Any]) -> list[Any]:
        """Arguments as they are before the call: it may change them."""
        try:
            return [self._packed(name, arguments[name]) for name in names]
        except Exception as error:
            self.give_up(error)
            return []

    def _packed(self, name: str, value: Any) -> Any:
        if isinstance(value, RoutingRequest):
            return values.pack_request(value, session_hash(value))
        if name == "events":
            return values.pack_events(value, self._symbols)
        return values.plain(value)

    def _note(self, place: int, packed: list[Any], result: Any) -> None:
        events, self._events = self._events, []
        prompts, self._prompts = self._prompts, {}
        if self._router is None:
            return
        try:
            entry: Entry = [place, packed]
            if INPUTS[place] == "on_kv_events":
                entry.append(values.pack_event_hashes(events, self._symbols))
            elif INPUTS[place] == "schedule":
                entry.append(values.pack_prompt_hashes(prompts, self._symbols))
                entry.append(summary(result) if isinstance(result, Decision) else {"refused": str(result)})
            self._write(entry)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """End the recording because of `error`."""
        self.stop()
        self._on_error(f"journal: {error}; it ends here and can be replayed up to here, requests go on")


def _iterables(method: Callable[..., Any]) -> tuple[str, ...]:
    """Parameters that may be given as an iterator, which could be read only once."""
    hints = typing.get_type_hints(method, localns={"array": list})
    return tuple(name for name, hint in hints.items() if typing.get_origin(hint) is Iterable)
