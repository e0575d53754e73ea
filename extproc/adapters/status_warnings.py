"""What an operator should look at now, each with its likely cause and what to do about it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from extproc.adapters.engine_key import Refusal
from extproc.adapters.holding import HeldState
from extproc.adapters.peer_status import PeerStatus
from extproc.adapters.recent_decisions import Ending
from extproc.core.snapshot import RouterSnapshot, WorkerSnapshot

_FEW = 20  # requests before shares of them mean anything
_MANY = 0.2
_ASLEEP = "the engine is asleep: requests wait there until somebody wakes it up"


class Severity(StrEnum):
    """How bad it is."""

    BAD = "bad"
    """Requests suffer."""
    ODD = "odd"
    """Decisions are worse than they could be."""


@dataclass(frozen=True, slots=True)
class Warning:  # noqa: A001 - the word for it; the builtin is not used here
    """One of them.

    Attributes:
        severity: how bad.
        subject: what it is about: a worker, a pool, a part of ours.
        text: what is seen.
        cause: the likely cause, and what to do.
    """

    severity: Severity
    subject: str
    text: str
    cause: str


@dataclass(frozen=True, slots=True)
class Observed:
    """What warnings are made from.

    Attributes:
        router: the router.
        pools_with_events: pools whose engines should publish KV events.
        stale_after_s: older engine metrics are not used.
        scrape_errors: of each endpoint whose metrics could not be read, or name ranks that are not expected.
        access_log_streams: open ones; None: not known.
        recent: how the last requests were decided and ended.
        log_failures: lines of the decision log that could not be written.
        journal_error: why the journal ended before its time.
        held: what is held, by pool.
        peers: other replicas.
        models_refused: of each endpoint that does not say what it serves, why.
    """

    router: RouterSnapshot
    pools_with_events: frozenset[str]
    stale_after_s: float
    scrape_errors: Mapping[str, str]
    access_log_streams: int | None
    recent: Sequence[Ending]
    log_failures: int = 0
    journal_error: str | None = None
    held: Sequence[HeldState] = ()
    peers: Sequence[PeerStatus] = ()
    models_refused: Mapping[str, Refusal] = field(default_factory=dict)


def warnings(seen: Observed) -> list[Warning]:
    """All of them, the worst first."""
    found = [*_pools(seen), *_held(seen), *_own(seen), *_peers(seen), *_refusals(seen), *_requests(seen)]
    for worker in seen.router.workers:
        found += _worker(worker, seen)
    return sorted(found, key=lambda one: one.severity is not Severity.BAD)


def _pools(seen: Observed) -> Iterator[Warning]:
    for pool in seen.router.pools:
        workers = [worker for worker in seen.router.workers if worker.pool == pool.name]
        if not workers:
            yield Warning(
                Severity.BAD, f"pool {pool.name}", "it has no workers: its requests are refused",
                "discovery finds none; check the pool's `discovery` settings",
            )  # fmt: skip
        elif not any(worker.ready for worker in workers):
            yield Warning(
                Severity.BAD, f"pool {pool.name}",
                f"none of its {len(workers)} workers is ready: its requests are refused",
                "their metrics pages cannot be read, or Envoy cannot connect to them",
            )  # fmt: skip
        elif any(worker.last_resort for worker in workers):
            cause = (
                "the engines are too busy to serve their metrics pages in time, or the pages are broken: add "
                "workers, or check `scrape`"
            )
            if any(worker.last_resort and _asleep(worker) for worker in workers):
                cause = "the engines are asleep: requests wait there until somebody wakes them up"
            yield Warning(
                Severity.BAD, f"pool {pool.name}",
                "none of its workers is ready: its requests go to those that were reached all the same",
                cause,
            )  # fmt: skip


def _peers(seen: Observed) -> Iterator[Warning]:
    for peer in seen.peers:
        if not peer.connected:
            yield Warning(
                Severity.ODD, f"replica {peer.name or peer.address}",
                "it is not heard: what it sends to the workers is seen late, by the engines' own counts",
                peer.error or "it is down, or cut off; check `peers`",
            )  # fmt: skip


def _refusals(seen: Observed) -> Iterator[Warning]:
    for endpoint, why in seen.models_refused.items():
        yield Warning(Severity.ODD, endpoint, why.text, why.advice)


def _held(seen: Observed) -> Iterator[Warning]:
    for held in seen.held:
        if not held.requests:
            continue
        causes = sorted({why for why in held.full.values() if why is not None})
        yield Warning(
            Severity.BAD, f"pool {held.pool}",
            f"{held.requests:,} requests are held, the oldest for {held.oldest_s:.1f} s",
            f"every worker is full ({', '.join(causes) or 'those that may serve them'}); "
            "add workers, or see `admission` for what counts as full",
        )  # fmt: skip


def _own(seen: Observed) -> Iterator[Warning]:
    if seen.access_log_streams == 0 and seen.router.open_requests:
        yield Warning(
            Severity.BAD, "access log",
            "Envoy sends no access log: ends of requests are guessed, and nothing is learned",
            "the access logger is missing in Envoy's configuration, or it cannot reach us",
        )  # fmt: skip
    if seen.log_failures:
        yield Warning(
            Severity.ODD, "decision log", f"{seen.log_failures:,} lines could not be written",
            "the disk is full, or the folder is gone or not writable",
        )  # fmt: skip
    if seen.journal_error is not None:
        yield Warning(
            Severity.ODD, "journal", "it has ended before its time",
            f"{seen.journal_error}; raise `journal.max_mb`, or make room",
        )  # fmt: skip


def _worker(worker: WorkerSnapshot, seen: Observed) -> Iterator[Warning]:
    name = str(worker.worker)
    error = seen.scrape_errors.get(worker.worker.endpoint)
    age = worker.metrics_age_s
    if not worker.ready:
        if _asleep(worker):
            cause = _ASLEEP
        elif worker.unreachable_s is not None:
            cause = "a request could not be delivered; it is tried again when its metrics can be read"
        else:
            cause = f"its metrics cannot be read ({error or 'no answer'}): it is down, overloaded or cut off"
        which = "only requests that no ready worker may serve" if worker.reached else "no requests"
        yield Warning(Severity.BAD, name, f"not ready: it gets {which}", cause)
    elif worker.last_resort:
        cause = f"it answers, but its metrics cannot be read ({error or 'no answer'})"
        if _asleep(worker):
            cause = _ASLEEP
        text = "not ready: it gets requests only because no other worker is"
        yield Warning(Severity.BAD, name, text, cause)
    elif age is None or age > seen.stale_after_s:
        since = "it never reported metrics" if age is None else f"its metrics are {age:.0f} s old"
        yield Warning(
            Severity.ODD, name, f"{since}: it is taken to be as busy as the busiest",
            error or "its metrics page is slow or unreachable; check `scrape`",
        )  # fmt: skip
    if worker.complaint is not None:
        yield Warning(Severity.ODD, name, "predictions fail", worker.complaint)
    if worker.pool in seen.pools_with_events:
        yield from _events(worker, name)


def _asleep(worker: WorkerSnapshot) -> bool:
    return worker.metrics is not None and worker.metrics.awake is False


def _events(worker: WorkerSnapshot, name: str) -> Iterator[Warning]:
    if worker.kv_suspended:
        yield Warning(
            Severity.ODD, name, "what its cache holds is not known at the moment",
            "the connection for KV events was lost: it may have restarted, empty",
        )  # fmt: skip
    elif not worker.kv_trusted and worker.complaint is None:
        if worker.event_age_s is None:
            yield Warning(
                Severity.ODD, name, "it has sent no KV events: its cache is guessed from what we send there",
                "it serves nothing yet, KV events are off in the engine, or `kv_events.endpoint` is another; "
                "`warmroute check` tells which",
            )  # fmt: skip
        else:
            yield Warning(
                Severity.ODD, name, "its KV events are not complete: hits there are uncertain",
                worker.kv_cause,
            )  # fmt: skip
    faults = worker.faults
    if faults.malformed:
        yield Warning(
            Severity.ODD, name, f"{faults.malformed:,} KV events cannot be understood",
            "the engine publishes them without token ids, or with other block sizes",
        )  # fmt: skip


def _requests(seen: Observed) -> Iterator[Warning]:
    lines = seen.recent
    if len(lines) < _FEW:
        return
    causes: dict[str, int] = {}
    for line in lines:
        if line.load_only:
            causes[line.load_only] = causes.get(line.load_only, 0) + 1
    if sum(causes.values()) > _MANY * len(lines):
        common = max(causes, key=lambda cause: causes[cause])
        yield Warning(
            Severity.ODD, "requests",
            f"{sum(causes.values()) / len(lines):.0%} of the last {len(lines)} were routed by load alone",
            f"most often: {common}",
        )  # fmt: skip
    for outcome, severity, cause in (
        ("failed", Severity.BAD, "workers fail after they have accepted requests; look at their logs"),
        ("lost", Severity.ODD, "Envoy's access log did not tell how they ended"),
    ):
        share = sum(line.outcome == outcome for line in lines) / len(lines)
        if share > _MANY / 4:
            yield Warning(severity, "requests", f"{share:.0%} of the last {len(lines)} {outcome}", cause)
    denied = sum(line.decision.startswith("warm-denied") for line in lines) / len(lines)
    if denied > _MANY:
        yield Warning(
            Severity.ODD, "requests",
            f"{denied:.0%} of the last {len(lines)} were denied a warm worker",
            "prefixes are hotter than their workers can serve: add workers, or allow more wait "
            "(`cost.max_extra_ttft_ms`)",
        )  # fmt: skip
