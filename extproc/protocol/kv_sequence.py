"""One publisher's message sequence: which payloads to apply, what to ask again, when to start over.

# Theory of operation

An engine numbers its messages 0, 1, 2, … and publishes them live. It keeps the last ones (10,000 by
default) and sends them again on request, from a given number on, ending with a marker. Live messages get
lost: the first ones after a connect, and the newest whenever the reader is slow. Replayed ones get lost when
the answer is long. A restarted engine counts from 0 again and says nothing about it.

The machine applies messages strictly in order, `last` being the number of the latest one applied, and asks
for a replay whenever it cannot go on. Live messages that arrive meanwhile wait in a bounded buffer and are
merged by number when the answer ends; if the buffer overflows, the newest are dropped, which only makes
another gap to fill.

*Same engine?* The fingerprints of the last few messages are kept, and every question is asked from the oldest
of them on: if the answer begins with the same bytes, the engine is the one we know, and only what follows is
new. Other bytes under a known number (payloads carry the time), or no answer while the publisher used to have
one: it restarted, even if it has counted past `last` since. An answer that begins after `last` cannot be
compared, and counts as a restart too. So does a live number that does not grow. Then the index is Reset and
rebuilt from 0. (One message of a new engine may slip in if it happens to bear the very next number before the
lost connection was noticed; hence a few fingerprints, not one.)

*Trust.* What has been applied is the whole truth if (1) it has no hole since message 0, or since the last
`AllBlocksCleared`, and (2) its end was seen to be the end: a live message has joined on, or a second, short
question brought nothing new (the head of an answer does not get lost, since queues are empty when it is
sent). Both hold: trusted. A hole that cannot be filled, a payload that cannot be read, a lost connection, a
restart: not trusted, with the cause. Untrusted content is still good for guessing. An empty answer alone
proves nothing, since a publisher may be set to keep nothing.

*Ranks.* Several data-parallel ranks may share a publisher. A clear makes irrelevant only what was lost about
the rank whose cache it emptied, so (1) is judged for each rank by itself, and `trust` is asked per rank.

*Suspended.* A lost connection most often is an engine that died, and the one that answers next may be
empty. So what has been said counts for nothing (Suspend) from the loss until the engine is known to be the
same or the index was reset (Resume): by the answer to the first question, or by a live message that carries
on from what is known.

*Memory.* What a machine knows of its place in the sequence can be taken (`memory`) and given to another, in
another process or later, beside what was applied until then. That one begins as after a lost connection: what
it was given is suspended until the engine is known to be the same.

*Checks.* Every `check_interval_s` the end is asked for again, so that a message lost just before a silence
(or a restart nobody noticed) is found. Live messages go on being applied meanwhile. If there is a hole
because nobody answered when it was found, the check asks for that too, and if it can be had now, starts over.
So it does, once, for a message that could not be read: where it has other bytes now, the wire had spoiled it.

*Without replay* (`replay=False`) nothing can be asked: a gap or a reconnect costs the trust until the engine
clears its cache or restarts under our eyes; a stream seen from message 0 on is trusted.

| state | connected | live message | replayed message | replay end | timeout |
|---|---|---|---|---|---|
| IDLE | ask: REBUILDING, REJOINING | wait | drop | drop | - |
| REBUILDING | ask again | wait | apply | merge: LIVE, FILLING | ask again; at last LIVE |
| REJOINING | ask again | wait | same: FILLING; other: reset | reset | ask again; at last LIVE |
| FILLING | ask: REJOINING | wait | same: apply; other: reset | merge: LIVE, FILLING | again; at last LIVE |
| LIVE | ask: REJOINING | apply; gap: FILLING; old: CHECKING | drop | drop | ask: CHECKING |
| CHECKING | ask: REJOINING | apply; gap: FILLING | same: apply; other: reset | LIVE | LIVE |

Every state goes to IDLE on disconnected; "reset" is Reset, then ask from 0: REBUILDING. A live number that
does not grow resets in every state (IDLE stays IDLE).
"""

from collections.abc import Iterable
from enum import Enum

from xxhash import xxh3_64_intdigest

from extproc.core.errors import ProtocolError
from extproc.protocol.kv_completeness import Completeness, Spoiled
from extproc.protocol.kv_sequence_types import (
    Action,
    Apply,
    RequestReplay,
    Reset,
    Resume,
    SequenceLimits,
    SequenceMemory,
    Suspend,
    Trust,
    TrustChanged,
)


class State(Enum):
    """Where the machine stands; see the table above."""

    IDLE = "idle"
    REBUILDING = "rebuilding"
    REJOINING = "rejoining"
    FILLING = "filling"
    LIVE = "live"
    CHECKING = "checking"


_SILENT = "no message seen yet"
_COMPLETE = "complete, and in step with the engine"
_ASKING = frozenset({State.REBUILDING, State.REJOINING, State.FILLING, State.CHECKING})
_LIVE = frozenset({State.LIVE, State.CHECKING})


_DEFAULT_LIMITS = SequenceLimits()


class KvSequence:
    """The machine. Every method returns the actions to take, in order.

    With `memory`, about a publisher that speaks for `rank` alone, it goes on where another stood; only where
    there is replay.
    """

    def __init__(
        self,
        *,
        replay: bool = True,
        limits: SequenceLimits = _DEFAULT_LIMITS,
        memory: SequenceMemory | None = None,
        rank: int = 0,
    ) -> None:
        self._replay = replay
        self._limits = limits
        self.state = State.IDLE
        self.last = -1  # number of the latest message applied
        self.gaps = 0  # holes found so far in front of a live message
        self._prints: dict[int, int] = {}  # number -> fingerprint of the latest messages applied
        self._newest: tuple[int, int] | None = None  # number and fingerprint of the latest live message
        self._content = Completeness()
        self._joined = False  # `last` is known to have been the end
        self._kept_replays = False  # this publisher has answered with messages before
        self._asked_last = -1  # `last` when the running question was asked; -1: it has nothing to compare
        self._asked_from = 0  # where the running question begins
        self._reached = -1  # highest number in the answer; -1: no message yet
        self._progress = False  # it brought something new
        self._fruitless = 0  # questions in a row that brought nothing new
        self._waiting: list[tuple[int, bytes]] = []
        self._waiting_bytes = 0
        self._deadline: float | None = None
        self._unproven = self._suspended = False
        self._cause = "not connected yet"
        self._told: tuple[object, ...] = (False, self._cause, None)
        if memory is not None and replay and memory.last >= 0:
            self.last, self._prints = memory.last, dict(memory.prints[-limits.overlap :])
            self._content = Completeness(memory.whole_since, frozenset({rank} if memory.cleared else ()))
            self._kept_replays = memory.kept_replays
            self._unproven = self._suspended = True

    def memory(self) -> SequenceMemory:
        """Where it stands, all actions it has returned being done."""
        content = self._content
        return SequenceMemory(
            self.last,
            tuple(self._prints.items()),
            content.since,
            bool(content.cleared),
            self._kept_replays,
        )

    def trust(self, rank: int = 0) -> Trust:
        """How far a rank is to be trusted, all actions returned so far being done."""
        live = self.state in _LIVE
        if live and not self._content.is_whole(rank):
            return Trust(trusted=False, cause=self._content.flaw)
        if live and self._joined:
            return Trust(trusted=True, cause=_COMPLETE)
        return Trust(trusted=False, cause=self._cause)

    @property
    def holds_back(self) -> bool:
        """Whether live messages wait for what comes before them."""
        return bool(self._waiting)

    def next_deadline(self) -> float | None:
        """When to call `tick`; None: not needed."""
        return self._deadline

    # --- events ------------------------------------------------------------------------------------

    def connected(self, now: float) -> list[Action]:
        """The live subscription is established (again)."""
        actions: list[Action] = []
        self._joined = False
        if not self._replay:
            self._cause = _SILENT
            if self.last >= 0:
                self._content.doubt("reconnected, and there is no replay endpoint to ask what was missed")
            self._drain(actions, skip_holes=True)
            self._go_live(now)
        else:
            self._cause = "connected, asking what was missed"
            state = State.REBUILDING if self.last < 0 else State.REJOINING
            self._ask(state, now, actions)
        return self._settled(actions)

    def disconnected(self, now: float) -> list[Action]:  # noqa: ARG002  # every event takes the time
        """The live subscription is lost; messages may be missed from now on."""
        self.state = State.IDLE
        self._deadline = None
        self._joined = False
        self._unproven = self.last >= 0
        self._cause = "disconnected"
        return self._settled([])

    def live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A published message.

        Raises:
            ProtocolError: the number is negative.
        """
        self._require_number(seq)
        actions: list[Action] = []
        fingerprint = xxh3_64_intdigest(payload)
        newest = self._newest
        if newest is not None and seq <= newest[0]:
            if newest == (seq, fingerprint):
                return actions  # the same message twice
            self._restarted(f"message {seq} came after {newest[0]}", now, actions)
        elif self.state in _LIVE and self._prints.get(seq, fingerprint) != fingerprint:
            self._restarted(f"message {seq} is another one now", now, actions)
        self._newest = (seq, fingerprint)
        if self.state not in _LIVE:
            self._wait(seq, payload)
        elif seq == self.last:
            self._joined = True  # a replay was faster
            self._unproven = False
        elif seq == self.last + 1:
            self._apply(seq, payload, actions)
            self._joined, self._unproven = True, False
        elif seq > self.last:
            self._gap(seq, payload, now, actions)
        elif seq not in self._prints and self.state is State.LIVE:
            # Much older than a replay we have seen: late, or from an engine that restarted.
            self._ask(State.CHECKING, now, actions)
        return self._settled(actions)

    def replayed(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A message of the answer to the latest request.

        Raises:
            ProtocolError: the number is negative (the end marker is `replay_end`).
        """
        self._require_number(seq)
        actions: list[Action] = []
        if self.state not in _ASKING:
            return actions  # what is left of an answer that was given up
        self._deadline = now + self._limits.reply_timeout_s
        self._kept_replays = True
        first = self._reached < 0
        if not self._same_engine(seq, payload, first, now, actions):
            return self._settled(actions)
        self._reached = max(self._reached, seq)
        if seq == self.last + 1:
            self._apply(seq, payload, actions)
            self._progress = True
        elif seq > self.last + 1:
            if first or not self._more_attempts():
                self._skip_to(seq, f"messages {self.last + 1} to {seq - 1} are gone from the replay buffer")
                self._apply(seq, payload, actions)
                self._progress = True
            else:
                self._ask_again(now, actions)
        return self._settled(actions)

    def replay_end(self, now: float) -> list[Action]:
        """The end marker of the answer to the latest request."""
        actions: list[Action] = []
        match self.state:
            case State.IDLE | State.LIVE:
                pass
            case State.REJOINING:
                self._restarted("the publisher no longer has the last message", now, actions)
            case State.CHECKING:
                self._end_check(now, actions)
            case State.REBUILDING | State.FILLING:
                self._end_fill(now, actions)
        return self._settled(actions)

    def tick(self, now: float) -> list[Action]:
        """Time has passed; does nothing before `next_deadline`."""
        actions: list[Action] = []
        if self._deadline is None or now < self._deadline:
            return actions
        match self.state:
            case State.IDLE:
                self._deadline = None
            case State.LIVE:
                self._ask(State.CHECKING, now, actions)
            case State.CHECKING:
                if self._reached >= 0:
                    self._content.spoiled = (
                        None  # answers break off, perhaps at it: do not ask for all every time
                    )
                self._go_live(now)
            case State.REBUILDING | State.REJOINING | State.FILLING:
                if self._more_attempts():
                    self._ask_again(now, actions)
                else:
                    self._give_up(now, actions)
        return self._settled(actions)

    def cleared(self, seq: int, rank: int = 0, ranks: Iterable[int] = (0,)) -> list[Action]:
        """Message `seq`, just applied, emptied the cache of `rank`: what it held before is irrelevant.

        `ranks` are all that the publisher speaks for, as far as that is known.
        """
        self._content.clear(seq, self.last, rank, ranks)
        return self._settled([])

    def unreadable(self, seq: int) -> list[Action]:
        """The payload of message `seq`, just applied, could not be decoded: its events are lost."""
        self._content.spoil(seq, self._prints.get(seq) if self._replay else None)
        return self._settled([])

    # --- steps -------------------------------------------------------------------------------------

    def _require_number(self, seq: int) -> None:
        if seq < 0:
            raise ProtocolError(
                f"KV message numbered {seq} in state {self.state.value}: the publisher is not a vLLM engine"
            )

    def _ask(self, state: State, now: float, actions: list[Action], *, fruitless: int = 0) -> None:
        """Ask from the oldest fingerprint on; what is known comes first, as proof of identity."""
        self.state = state
        self._fruitless = fruitless
        self._asked_last, self._reached = self.last, -1
        self._progress = False
        self._deadline = now + self._limits.reply_timeout_s
        start = next(iter(self._prints), 0)
        if state is State.CHECKING and (mend_from := self._content.mend_from) is not None:
            start = min(start, mend_from)
        self._asked_from = start
        actions.append(RequestReplay(start))

    def _more_attempts(self) -> bool:
        return self._progress or self._fruitless + 1 < self._limits.attempts

    def _ask_again(self, now: float, actions: list[Action]) -> None:
        """The running answer is incomplete: ask for the rest."""
        self._ask(self.state, now, actions, fruitless=0 if self._progress else self._fruitless + 1)

    def _same_engine(self, seq: int, payload: bytes, first: bool, now: float, actions: list[Action]) -> bool:
        """Judge a message of an answer; False if it sent us back to message 0."""
        content = self._content
        if first and self.state is State.CHECKING and content.hole is not None:
            if seq <= content.hole:
                self._start_over(f"message {content.hole} can be had again", now, actions)
                return False
            content.hole = None
        spoiled = content.spoiled if self.state is State.CHECKING else None
        if spoiled is not None and self._reads_otherwise(spoiled, seq, payload):
            self._start_over(f"message {seq} can be read now", now, actions)
            return False
        if self._asked_last < 0:
            return True
        known = self._prints.get(seq)
        if known is not None:
            if known != xxh3_64_intdigest(payload):
                self._restarted(f"message {seq} is another one now", now, actions)
                return False
            self._unproven = False
            if self.state is State.REJOINING:
                self.state = State.FILLING
        elif seq > self._asked_last and (first or self.state is State.REJOINING):
            # What we know is too old to be compared: take what the publisher has, from its first message.
            actions.append(Reset())
            self._forget()
            self.state = State.REBUILDING
        return True

    def _reads_otherwise(self, spoiled: Spoiled, seq: int, payload: bytes) -> bool:
        """Whether this is the message that could not be read, with other bytes; then all can be had again."""
        if self._asked_from > spoiled.since:
            return False  # asked before it came
        if self._reached < 0 and seq > spoiled.since:
            self._content.spoiled = None  # what came before it is gone: nothing would be whole
            return False
        if seq != spoiled.seq:
            return False
        self._content.spoiled = None  # no question will mend the same bytes
        return xxh3_64_intdigest(payload) != spoiled.fingerprint

    def _gap(self, seq: int, payload: bytes, now: float, actions: list[Action]) -> None:
        """A live message that cannot be applied yet."""
        self.gaps += 1
        if self._replay:
            self._joined = False
            self._cause = f"messages {self.last + 1} to {seq - 1} are missing"
            self._wait(seq, payload)
            self._ask(State.FILLING, now, actions)
        else:
            self._skip_to(seq, f"messages {self.last + 1} to {seq - 1} are lost: there is no replay endpoint")
            self._apply(seq, payload, actions)
            self._joined, self._unproven = True, False

    def _end_fill(self, now: float, actions: list[Action]) -> None:
        self._drain(actions, skip_holes=False)
        behind = self._newest is not None and self._newest[0] > self.last
        if behind and self._more_attempts():
            self._ask_again(now, actions)
            return
        self._drain(actions, skip_holes=True)
        self._go_live(now)
        if self.last < 0:
            self._cause = _SILENT
        elif not self._joined:
            self._ask(State.CHECKING, now, actions)

    def _end_check(self, now: float, actions: list[Action]) -> None:
        if self._reached < 0 and self._kept_replays and self.last >= 0:
            self._restarted("the publisher no longer has the last message", now, actions)
        elif self._progress and not self._joined:
            self._ask(State.CHECKING, now, actions)
        else:
            self._joined = self._joined or self._reached == self.last >= 0
            self._go_live(now)
            if self.last < 0:
                self._cause = _SILENT

    def _give_up(self, now: float, actions: list[Action]) -> None:
        """No answer: go on with what there is."""
        if self.state is State.REJOINING:
            self._content.doubt("the replay endpoint did not answer after a reconnect")
            self._content.hole = self.last
        elif self.last < 0:
            self._cause = "the replay endpoint does not answer"
        self._drain(actions, skip_holes=True)
        self._go_live(now)

    def _go_live(self, now: float) -> None:
        self.state = State.LIVE
        self._deadline = now + self._limits.check_interval_s if self._replay else None

    def _restarted(self, cause: str, now: float, actions: list[Action]) -> None:
        self._start_over(f"the engine restarted: {cause}", now, actions)

    def _start_over(self, cause: str, now: float, actions: list[Action]) -> None:
        """Forget everything and begin again."""
        actions.append(Reset())
        self._forget()
        self._cause = cause
        if self._replay and self.state is not State.IDLE:
            self._ask(State.REBUILDING, now, actions)

    def _forget(self) -> None:
        self.last = self._asked_last = -1
        self._unproven = False
        self._content.begin_anew()
        self._prints.clear()
        self._newest = None
        self._joined = False
        self._waiting.clear()
        self._waiting_bytes = 0

    def _wait(self, seq: int, payload: bytes) -> None:
        limits = self._limits
        if len(self._waiting) < limits.max_waiting and self._waiting_bytes < limits.max_waiting_bytes:
            self._waiting.append((seq, payload))
            self._waiting_bytes += len(payload)

    def _drain(self, actions: list[Action], *, skip_holes: bool) -> None:
        """Apply the live messages that waited, up to the first hole or beyond."""
        done = 0
        for seq, payload in self._waiting:
            if seq > self.last + 1:
                if not skip_holes:
                    break
                self._content.lose(self.last + 1)
                self._skip_to(seq, f"messages {self.last + 1} to {seq - 1} could not be had again")
            if seq == self.last + 1:
                self._apply(seq, payload, actions)
            done += 1
            self._waiting_bytes -= len(payload)
        if done and self._newest is not None and self._newest[0] == self.last:
            self._joined = True
        del self._waiting[:done]

    def _apply(self, seq: int, payload: bytes, actions: list[Action]) -> None:
        self.last = seq
        self._prints[seq] = xxh3_64_intdigest(payload)
        if len(self._prints) > self._limits.overlap:
            del self._prints[next(iter(self._prints))]
        actions.append(Apply(seq, payload))

    def _skip_to(self, seq: int, cause: str) -> None:
        self._content.skip_to(seq, cause)
        self.last = seq - 1

    def _settled(self, actions: list[Action]) -> list[Action]:
        """Tell what has changed: trust in any rank, why there is none, whether the content counts at all."""
        if self._unproven != self._suspended:
            self._suspended = self._unproven
            actions.append(Suspend() if self._unproven else Resume())
        live = self.state in _LIVE
        joined = live and self._joined
        content = self._content
        flawed = (content.flaw, content.cleared) if live and content.since != 0 else None
        told = (joined, _COMPLETE if joined else self._cause, flawed)
        if told != self._told:
            self._told = told
            actions.append(TrustChanged())
        return actions
