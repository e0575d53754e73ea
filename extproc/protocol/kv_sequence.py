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

*Suspended.* A lost connection most often is an engine that died, and the one that answers next may be
empty. So what has been said counts for nothing (Suspend) from the loss until the engine is known to be the
same or the index was reset (Resume): by the answer to the first question, or by a live message that carries
on from what is known.

*Checks.* Every `check_interval_s` the end is asked for again, so that a message lost just before a silence
(or a restart nobody noticed) is found. Live messages go on being applied meanwhile. If there is a hole
because nobody answered when it was found, the check asks for that too, and if it can be had now, starts over.

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

from dataclasses import dataclass
from enum import Enum

from extproc.core.errors import ProtocolError


class State(Enum):
    """Where the machine stands; see the table above."""

    IDLE = "idle"
    REBUILDING = "rebuilding"
    REJOINING = "rejoining"
    FILLING = "filling"
    LIVE = "live"
    CHECKING = "checking"


_ASKING = frozenset({State.REBUILDING, State.REJOINING, State.FILLING, State.CHECKING})
_LIVE = frozenset({State.LIVE, State.CHECKING})


@dataclass(frozen=True, slots=True)
class Apply:
    """Decode this payload and apply it to the index."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RequestReplay:
    """Ask for messages from `from_seq` on. Answers to earlier requests must not be passed on any more."""

    from_seq: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget what this publisher's events have said."""


@dataclass(frozen=True, slots=True)
class TrustChanged:
    """Whether what has been applied is the whole truth, and why it changed."""

    trusted: bool
    cause: str


@dataclass(frozen=True, slots=True)
class Suspend:
    """Do not predict from what this publisher has said: it may be gone. Keep it."""


@dataclass(frozen=True, slots=True)
class Resume:
    """What this publisher has said counts again, as far as it was not reset."""


Action = Apply | RequestReplay | Reset | TrustChanged | Suspend | Resume


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """How long to wait, and how much to keep.

    Attributes:
        reply_timeout_s: without a replayed message for so long, an answer counts as over, and incomplete.
        attempts: how many answers in a row may bring nothing before a hole is given up.
        check_interval_s: how often the end of the sequence is asked for.
        overlap: how many known messages a question asks for again, to compare.
        max_waiting: live messages kept while a replay runs.
        max_waiting_bytes: their total size.
    """

    reply_timeout_s: float = 5.0
    attempts: int = 3
    check_interval_s: float = 30.0
    overlap: int = 16
    max_waiting: int = 50_000
    max_waiting_bytes: int = 64 << 20


_DEFAULT_LIMITS = SequenceLimits()


class KvSequence:
    """The machine. Every method returns the actions to take, in order."""

    def __init__(self, *, replay: bool = True, limits: SequenceLimits = _DEFAULT_LIMITS) -> None:
        self._replay = replay
        self._limits = limits
        self.state = State.IDLE
        self.last = -1  # number of the latest message applied
        self.gaps = 0  # holes found so far in front of a live message
        self._prints: dict[int, int] = {}  # number -> fingerprint of the latest messages applied
        self._newest: tuple[int, int] | None = None  # number and fingerprint of the latest live message
        self._whole_since: int | None = 0  # everything from here to `last` was applied; None: last is unsure
        self._cleared = False  # a clear since then makes what was before irrelevant
        self._hole: int | None = None  # first number of a hole that may perhaps be had later
        self._joined = False  # `last` is known to have been the end
        self._kept_replays = False  # this publisher has answered with messages before
        self._asked_last = -1  # `last` when the running question was asked; -1: it has nothing to compare
        self._reached = -1  # highest number in the answer; -1: no message yet
        self._progress = False  # it brought something new
        self._fruitless = 0  # questions in a row that brought nothing new
        self._waiting: list[tuple[int, bytes]] = []
        self._waiting_bytes = 0
        self._deadline: float | None = None
        self._unproven = self._suspended = False
        self._trusted = False
        self._cause = self._told = "not connected yet"

    @property
    def trusted(self) -> bool:
        """As last told by `TrustChanged`."""
        return self._trusted

    @property
    def cause(self) -> str:
        """Why it is trusted, or not."""
        return self._cause

    def next_deadline(self) -> float | None:
        """When to call `tick`; None: not needed."""
        return self._deadline

    # --- events ------------------------------------------------------------------------------------

    def connected(self, now: float) -> list[Action]:
        """The live subscription is established (again)."""
        actions: list[Action] = []
        self._joined = False
        if not self._replay:
            self._cause = "no message seen yet"
            if self.last >= 0:
                self._doubt("reconnected, and there is no replay endpoint to ask what was missed")
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
        fingerprint = hash(payload)
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
                self._go_live(now)
            case State.REBUILDING | State.REJOINING | State.FILLING:
                if self._more_attempts():
                    self._ask_again(now, actions)
                else:
                    self._give_up(now, actions)
        return self._settled(actions)

    def cleared(self, seq: int) -> list[Action]:
        """Message `seq`, just applied, emptied the engine's cache: what was before is irrelevant."""
        if self._whole_since is None:
            self._whole_since = seq
        if self._whole_since <= seq <= self.last:
            self._cleared = True
            self._hole = None
        return self._settled([])

    def unreadable(self, seq: int) -> list[Action]:
        """The payload of message `seq`, just applied, could not be decoded: its events are lost."""
        if self._whole_since is None or seq >= self._whole_since:
            self._doubt(f"message {seq} could not be read")
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
        if state is State.CHECKING and self._hole is not None:
            start = min(start, self._hole)
        actions.append(RequestReplay(start))

    def _more_attempts(self) -> bool:
        return self._progress or self._fruitless + 1 < self._limits.attempts

    def _ask_again(self, now: float, actions: list[Action]) -> None:
        """The running answer is incomplete: ask for the rest."""
        self._ask(self.state, now, actions, fruitless=0 if self._progress else self._fruitless + 1)

    def _same_engine(self, seq: int, payload: bytes, first: bool, now: float, actions: list[Action]) -> bool:
        """Judge a message of an answer; False if it sent us back to message 0."""
        if first and self.state is State.CHECKING and self._hole is not None:
            if seq <= self._hole:
                self._start_over(f"message {self._hole} can be had again", now, actions)
                return False
            self._hole = None
        if self._asked_last < 0:
            return True
        known = self._prints.get(seq)
        if known is not None:
            if known != hash(payload):
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
        if not self._joined and self.last >= 0:
            self._ask(State.CHECKING, now, actions)

    def _end_check(self, now: float, actions: list[Action]) -> None:
        if self._reached < 0 and self._kept_replays and self.last >= 0:
            self._restarted("the publisher no longer has the last message", now, actions)
        elif self._progress and not self._joined:
            self._ask(State.CHECKING, now, actions)
        else:
            self._joined = self._joined or self._reached == self.last >= 0
            self._go_live(now)

    def _give_up(self, now: float, actions: list[Action]) -> None:
        """No answer: go on with what there is."""
        if self.state is State.REJOINING:
            self._doubt("the replay endpoint did not answer after a reconnect")
            self._hole = self.last
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
        self._hole = None
        self._prints.clear()
        self._newest = None
        self._whole_since, self._cleared, self._joined = 0, False, False
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
                self._hole = self.last + 1 if self._hole is None else self._hole
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
        self._prints[seq] = hash(payload)
        if len(self._prints) > self._limits.overlap:
            del self._prints[next(iter(self._prints))]
        actions.append(Apply(seq, payload))

    def _skip_to(self, seq: int, cause: str) -> None:
        self._whole_since, self._cleared = seq, False
        self.last = seq - 1
        self._cause = cause

    def _doubt(self, cause: str) -> None:
        """Something is missing, and no number says where it ends: untrusted until a clear."""
        self._whole_since, self._cleared = None, False
        self._cause = cause

    def _settled(self, actions: list[Action]) -> list[Action]:
        """Tell what has changed: the trust, the reason for distrust, whether the content counts at all."""
        if self._unproven != self._suspended:
            self._suspended = self._unproven
            actions.append(Suspend() if self._unproven else Resume())
        whole = self._cleared or self._whole_since == 0
        trusted = whole and self._joined and self.state in _LIVE
        if trusted:
            self._cause = "complete, and in step with the engine"
        if trusted != self._trusted or self._cause != self._told:
            self._trusted, self._told = trusted, self._cause
            actions.append(TrustChanged(trusted, self._cause))
        return actions
