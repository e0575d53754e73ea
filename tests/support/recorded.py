"""Traffic on a recorded router, with everything that goes wrong in a fleet."""

from random import Random

from extproc.core.candidates import PoolFacts
from extproc.core.cost import CostSettings
from extproc.core.errors import NoEndpointError
from extproc.core.hashing import token_array
from extproc.core.namespace import Namespace
from extproc.core.peer_loads import PeerNews, SentPrefix, ToldLoad
from extproc.core.policies import POLICIES
from extproc.core.rollout import Mode
from extproc.core.router import RouterSettings
from extproc.core.tenancy import TenantBook, TenantPolicy
from extproc.core.types import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Completion,
    Outcome,
    Rendition,
    Tier,
)
from extproc.journal.header import Header
from extproc.journal.tap import Recorder
from tests.support.core import BLOCK, NAMESPACE, members, metrics, request, worker

HEADER = Header(
    seed=7,
    policy="token-load",
    pools={
        "default": PoolFacts(
            NAMESPACE.model_revision, NAMESPACE.tokenizer_revision, BLOCK, learn_revision=True
        )
    },
    costs=CostSettings(prefill_tokens_per_s=4_000.0),
    settings=RouterSettings(lease_expiry_s=20.0),
    others=tuple(POLICIES),
    shadow=("least-load", "session-affinity"),
    tenants=TenantBook(
        {
            "gold": TenantPolicy(weight=3.0),
            "silver": TenantPolicy(weight=1.0, cold_quota=0.5, workers=frozenset({"10.0.0.1", "10.0.0.2"})),
        },
        TenantPolicy(),
    ),
)
WORKERS = 4


class Traffic:
    """Drives one router; `entries` is what was recorded, `decisions` what was decided."""

    def __init__(self, header=HEADER, seed=3, entries=None, policies=POLICIES):
        self.entries = [] if entries is None else entries
        self.decisions = []
        self.refused = 0
        ids = iter(range(10**9))
        self.recorder = Recorder(self.entries.append, on_error=self._failed)
        self.router = header.build(
            policies,
            lambda: f"lease-{next(ids)}",
            self.recorder.prompt_hashes,
            self.recorder.event_hashes,
        )
        self.recorder.attach(self.router)
        self.rng = Random(seed)
        self.now = 100.0
        self.open = []
        self.peer = Random(seed + 1)
        self.news = 0
        self.handles = iter(range(1, 10**9))
        self.stored = {n: [] for n in range(WORKERS)}
        self.shelves = [[self.rng.randrange(1, 30_000) for _ in range(n)] for n in (90, 300, 900, 1800, 2500)]
        self.router.on_membership(iter(members(WORKERS)), self.now)
        for n in range(WORKERS):
            self.router.on_models(worker(n).endpoint, "model", iter(("lora",)))
        for n in range(WORKERS - 1):  # the last one publishes no events
            self.router.on_kv_trust(worker(n), "replayed", trusted=True)

    def _failed(self, text):
        raise AssertionError(text)

    def run(self, requests):
        for number in range(requests):
            self.now += self.rng.expovariate(20.0)
            self._ask(number)
            if self.rng.random() < 0.03:
                self._fault()
            if self.peer.random() < 0.1:
                self._hear_peer()
            if self.peer.random() < 0.003:
                self._restore(self.peer.randrange(WORKERS - 1))
            if self.rng.random() < 0.1:
                self._scrape(self.rng.randrange(WORKERS))
            while self.open and (len(self.open) > 30 or self.rng.random() < 0.5):
                self._end(self.open.pop(self.rng.randrange(len(self.open))))
            if number % 25 == 0:
                self.router.tick(self.now)
        return self

    def _ask(self, number):
        rng = self.rng
        tokens = rng.choice(self.shelves)[: rng.choice((80, 700, 9999))] + [number] * rng.randrange(1, 60)
        ask = request(
            tokens,
            request_id=f"request-{number}",
            namespace=rng.choice((NAMESPACE, NAMESPACE, Namespace("model", "tokenizer", "lora", "salt"))),
            policy=rng.choice((None, None, *POLICIES)),
            session_key=rng.choice((None, "anna", "bert")),
            max_output=rng.choice((None, 8, 400)),
            stream=rng.random() < 0.8,
            tenant=rng.choice(("", "gold", "silver")),
            mode=rng.choice((Mode.ENFORCE,) * 8 + (Mode.OBSERVE, Mode.SHADOW)),
            expected_output_tokens=rng.choice((None, None, 50)),
            sequences=rng.choice((1, 1, 1, 2)),
        )
        if rng.random() < 0.05:
            ask.prompts, ask.load_only = (), "too-long"
        if rng.random() < 0.1:
            later = token_array(number for token in tokens for number in (token, 7))
            ask.renditions = {"model-2": Rendition("other-tokenizer", (later,))}
        if rng.random() < 0.05:
            ask.subset = frozenset({worker(1).endpoint, worker(2).endpoint})
        try:
            decision = self.router.schedule(ask, self.now)
        except NoEndpointError:
            self.refused += 1
            return
        self.decisions.append(decision)
        self.open.append((decision, tokens))
        if rng.random() < 0.3:
            elsewhere = rng.choice(decision.candidates).worker.endpoint
            self.router.on_served(decision.lease_id, elsewhere, self.now)

    def _end(self, pair):
        (decision, tokens), rng = pair, self.rng
        lease, chosen = decision.lease_id, decision.chosen.worker
        self.now += 0.001
        how = rng.random()
        if how < 0.05:
            return  # its end is never told
        if how < 0.15:
            undelivered = rng.random() < 0.5
            self.router.on_stream_ended(lease, self.now, undelivered=undelivered)
            if undelivered:
                self.router.on_left_early(
                    decision.request.request_id, Completion(Outcome.CANCELLED), self.now
                )
            self.router.release(lease, Completion(Outcome.CANCELLED), self.now)
            return
        if how < 0.2:
            elsewhere = rng.choice(decision.candidates).worker.endpoint
            broken = Completion(Outcome.FAILED, served_by=elsewhere, status=503, attempts=2)
            self.router.release(lease, broken, self.now)
            return
        self.router.on_first_token(lease, self.now)
        self.router.on_progress(lease, rng.randrange(9), self.now)
        n = int(chosen.endpoint.split(".")[3].split(":")[0])
        if n < WORKERS - 1:
            self._store(n, tokens, decision.request.namespace)
        took = rng.uniform(5.0, 400.0)
        done = Completion(
            Outcome.FINISHED,
            served_by=chosen.endpoint,
            status=200,
            attempts=1,
            first_body_ms=took,
            upstream_first_body_ms=took - 1.0,
            duration_ms=took * 3,
            prompt_tokens=len(tokens),
            cached_tokens=rng.choice((decision.chosen.cached_tokens, decision.chosen.cached_tokens, 0, None)),
            output_tokens=rng.randrange(1, 200),
            labels={"tried": chosen.endpoint} if rng.random() < 0.1 else {},
        )
        self.router.release(lease, done, self.now)
        if rng.random() < 0.1:
            self.router.release(lease, done, self.now)

    def _store(self, n, tokens, namespace):
        count = len(tokens) // BLOCK
        handles = tuple(
            next(self.handles) if self.rng.random() < 0.7 else next(self.handles).to_bytes(32, "big")
            for _ in range(count)
        )
        extra = None
        if namespace.cache_salt:
            extra = (("lora", "salt"), *((("lora",),) * (count - 1)))[:count]
        event = BlockStored(handles, None, tokens[: count * BLOCK], BLOCK, namespace.adapter, extra)
        split = self.rng.randrange(count + 1)
        if 0 < split < count and extra is None:  # the tail comes first: it waits for its parent
            tail = BlockStored(
                handles[split:], handles[split - 1], tokens[split * BLOCK : count * BLOCK], BLOCK
            )
            head = BlockStored(handles[:split], None, tokens[: split * BLOCK], BLOCK)
            events = [tail, head]
        else:
            events = [event]
        self.stored[n].append(handles)
        if len(self.stored[n]) > 40:
            gone = self.stored[n].pop(self.rng.randrange(40))
            events.append(BlockRemoved(gone[len(gone) // 2 :]))
        if self.rng.random() < 0.1:
            events.append(BlockStored(handles[:1], None, tokens[:BLOCK], BLOCK, tier=Tier.CPU))
        if self.rng.random() < 0.05:
            events.append(BlockStored((next(self.handles),), None, tokens[:5], BLOCK))  # malformed
            events.append(BlockRemoved((5_000_000_000,)))
        self.router.on_kv_events(worker(n), events, self.now)

    def _hear_peer(self):
        rng, self.news = self.peer, self.news + 1
        loads = tuple(
            (
                worker(n),
                ToldLoad(rng.randrange(5), 1, rng.randrange(9999), 50, rng.random() * 900, 400.0, 80.0),
            )
            for n in range(WORKERS)
            if rng.random() < 0.6
        )
        sent = SentPrefix(
            worker(rng.randrange(WORKERS)), tuple(rng.randrange(1 << 64) for _ in range(9)), 1.5
        )
        news = PeerNews(f"peer-{rng.randrange(3)}", 1, self.news, rng.random() < 0.3, loads, (sent,))
        self.router.on_peer_news(news, self.now)

    def _restore(self, n):
        parts = self.router.index.export(worker(n), 40)
        self.router.on_kv_restored(worker(n), parts, self.now)
        self.router.on_kv_suspended(worker(n), suspended=self.peer.random() < 0.5)
        if self.peer.random() < 0.5:
            self.router.on_kv_trust(worker(n), "replayed", trusted=True)

    def _scrape(self, n):
        rng = self.rng
        seen = metrics(
            running=rng.randrange(5), waiting=rng.randrange(3), kv_usage=rng.random(),
            num_gpu_blocks=rng.choice((300, 10_000)), prompt_tokens=self.now * 100,
        )  # fmt: skip
        self.router.on_metrics(worker(n).endpoint, {0: seen}, self.now)

    def _fault(self):
        rng, router, n = self.rng, self.router, self.rng.randrange(WORKERS)
        match rng.randrange(10):
            case 0:  # a worker flaps
                router.on_membership(
                    [m for m in members(WORKERS) if m.endpoint != worker(n).endpoint], self.now
                )
                self._ask(10**6 + len(self.decisions))
                router.on_membership(members(WORKERS), self.now + 0.01)
                self.stored[n].clear()
            case 1:  # events are lost
                router.on_kv_trust(worker(n), "a gap", trusted=False)
                router.on_kv_heard(worker(n), self.now)
            case 2:  # an engine restarts
                router.on_kv_suspended(worker(n), suspended=True)
                router.on_kv_reset(worker(n))
                router.on_kv_suspended(worker(n), suspended=False)
                router.on_kv_trust(worker(n), "replayed", trusted=True)
                self.stored[n].clear()
            case 3:
                router.on_kv_events(worker(n), [AllBlocksCleared()], self.now)
                self.stored[n].clear()
            case 4:  # metrics fail until it is out, and come back
                for _ in range(rng.randrange(1, 5)):
                    router.on_scrape_failure(worker(n).endpoint)
                self._ask(2 * 10**6 + len(self.decisions))
                self._scrape(n)
            case 9:  # or its page comes too late, or is none
                for _ in range(rng.randrange(1, 5)):
                    router.on_page_failure(worker(n).endpoint, self.now - 2.0, slow=rng.random() < 0.7)
                self._ask(3 * 10**6 + len(self.decisions))
                self._scrape(n)
            case 5:
                router.on_metrics(worker(n).endpoint, {0: metrics(running=0, waiting=0)}, self.now)
            case 6:  # a pause, in which leases expire
                self.now += rng.choice((0.0, 1.0, 25.0))
                router.tick(self.now)
            case 7:
                router.on_access_log(is_open=rng.random() < 0.5)
            case 8:  # an update of the model begins, or is taken back
                router.on_models(worker(n).endpoint, rng.choice(("model", "model", "model-2")), ("lora",))
