from hypothesis import given
from hypothesis import strategies as st

from extproc.core.assumed_cache import DEFAULT_CAPACITY, LIFETIME_S, AssumedCache
from extproc.core.kv_index import KvIndex
from tests.support.core import worker

W = worker(0)


def make(**options):
    index = KvIndex(**options)
    index.add_worker(W, "m", "t")
    return index, AssumedCache(index)


def hit(index, chain):
    return next((match.blocks for match in index.match(chain)), 0)


def send(index, cache, ticket, chain, blocks, capacity):
    """A request that will use so many blocks in all."""
    index.reserve(W, chain)
    cache.admit(W, ticket, max(0, blocks - len(chain)), capacity)


def end(index, cache, ticket, chain, now):
    index.unreserve(W, chain, now)
    cache.done(W, ticket)


def test_a_served_prefix_is_found_again():
    index, cache = make()
    cache.record(W, [1, 2, 3], None, 0.0)
    assert hit(index, [1, 2, 3, 4]) == 3
    assert hit(index, [1, 2]) == 2
    assert hit(index, [9]) == 0


def test_the_least_recently_used_goes_first_and_the_end_before_the_beginning():
    index, cache = make()
    cache.record(W, [1, 2, 3], 4, 0.0)
    cache.record(W, [11, 12], 4, 0.0)
    assert hit(index, [1, 2, 3]) == 2
    cache.record(W, [1, 2], 4, 0.0)
    cache.record(W, [21, 22], 4, 0.0)
    assert hit(index, [11, 12]) == 0
    assert hit(index, [1, 2]) == 2


def test_what_the_engine_did_not_have_is_forgotten_with_all_behind_it():
    index, cache = make()
    cache.record(W, [1, 2, 3], None, 0.0)
    cache.record(W, [1, 2, 4, 5], None, 0.0)
    cache.forget(W, [1, 2, 3], 1, 1.0)
    assert hit(index, [1, 2, 3]) == hit(index, [1, 2, 4, 5]) == 1
    assert cache.blocks(W) == 1
    cache.forget(W, [1, 9], 1, 1.0)
    assert cache.blocks(W) == 1


def test_what_others_have_used_since_a_request_was_sent_is_not_forgotten():
    index, cache = make()
    cache.record(W, [1, 2, 3], None, 0.0)
    cache.record(W, [1, 2, 4], None, 5.0)
    index.reserve(W, [1, 2, 5])
    cache.record(W, [1, 2, 5], None, 1.0)
    cache.forget(W, [1, 2, 6], 0, 5.0)
    assert [hit(index, [1, 2, block]) for block in (3, 4, 5)] == [2, 3, 3]


def test_dropping_leaves_requests_in_flight_alone():
    index, cache = make()
    index.reserve(W, [1, 2])
    cache.record(W, [1, 2, 3], None, 0.0)
    cache.drop(W)
    assert hit(index, [1, 2, 3]) == 2
    assert W not in cache


def test_a_removed_worker_takes_its_assumptions_along():
    index, cache = make()
    cache.record(W, [1], None, 0.0)
    index.remove_worker(W)
    cache.record(W, [1], None, 0.0)
    cache.forget(W, [1], 0, 1.0)
    cache.expire(9e9)
    cache.admit(W, "a", 1, 1)
    cache.remove_worker(W)
    index.add_worker(W, "m", "t")
    assert hit(index, [1]) == 0
    cache.drop(W)


def test_answers_take_room_and_go_before_the_prompts_they_belong_to():
    index, cache = make()
    cache.record(W, [1, 2, 3], 10, 0.0, answer_blocks=4)
    cache.record(W, [11, 12, 13], 10, 1.0, answer_blocks=4)
    assert hit(index, [1, 2, 3]) == 3  # the first answer made room
    cache.record(W, [21], 10, 2.0)
    assert hit(index, [1, 2, 3]) == 2
    assert cache.blocks(W) == 6


def test_a_request_on_its_way_makes_room_and_keeps_what_it_uses():
    index, cache = make()
    cache.record(W, [1, 2, 3], 8, 0.0)
    cache.record(W, [11, 12], 8, 1.0)
    send(index, cache, "a", [1, 2, 21], 6, 8)  # 6 of 8 are taken, so only two unused ones remain
    assert hit(index, [1, 2]) == 2
    assert hit(index, [11, 12]) == 2
    assert hit(index, [1, 2, 3]) == 2
    send(index, cache, "b", [31, 32], 2, 8)
    assert hit(index, [11]) == 0
    assert hit(index, [1, 2]) == 2
    end(index, cache, "a", [1, 2, 21], 3.0)
    end(index, cache, "b", [31, 32], 3.0)
    cache.record(W, [31, 32], 8, 3.0)
    assert hit(index, [1, 2]) == 2
    assert hit(index, [1, 2, 21]) == 2  # it was never said to have been served
    cache.done(W, "a")


def test_what_two_requests_use_stays_until_both_are_done():
    index, cache = make()
    cache.record(W, [1, 2], 4, 0.0)
    for ticket in "ab":
        send(index, cache, ticket, [1, 2], 2, 4)
    end(index, cache, "a", [1, 2], 1.0)
    cache.record(W, [11, 12, 13, 14], 4, 2.0)
    assert hit(index, [1, 2]) == 2
    end(index, cache, "b", [1, 2], 3.0)
    cache.record(W, [21, 22, 23, 24], 4, 4.0)
    assert hit(index, [1, 2]) == 0


def test_a_ticket_that_comes_twice_takes_its_room_once():
    index, cache = make()
    cache.record(W, [1, 2, 3, 4], 8, 0.0)
    for _ in range(3):
        cache.admit(W, "a", 4, 8)
    assert hit(index, [1, 2, 3, 4]) == 4


def test_what_was_not_used_for_long_is_forgotten():
    index, cache = make()
    cache.record(W, [1, 2], None, 0.0, answer_blocks=5)
    cache.record(W, [1, 3], None, 10.0)
    cache.expire(LIFETIME_S)
    assert [hit(index, [1, block]) for block in (2, 3)] == [1, 2]
    assert index.stats(W).reservations == cache.blocks(W) == 2


def test_until_metrics_tell_an_engine_is_taken_to_hold_a_few_thousand_blocks():
    index, cache = make()
    cache.record(W, range(DEFAULT_CAPACITY), None, 0.0)
    cache.record(W, [-1], None, 0.0)
    assert hit(index, range(DEFAULT_CAPACITY)) == DEFAULT_CAPACITY - 1


def test_the_ceiling_of_the_index_holds_for_what_is_assumed():
    index, cache = make(max_blocks=4)
    cache.record(W, [1, 2, 3], None, 0.0)
    cache.record(W, [11, 12, 13], None, 1.0)
    assert (hit(index, [1, 2, 3]), hit(index, [11, 12, 13])) == (1, 3)
    assert index.entries == 4


class Plain:
    """The same, block by block. A block is named by all the blocks before it, so it is in one place only."""

    def __init__(self):
        self.reserved, self.assumed, self.tickets = [], set(), {}
        self.queue = []  # (block or None for one of an answer, when it was used), the oldest first

    def in_use(self):
        return {block for chain in self.reserved for block in chain}

    def evict(self, capacity):
        room = max(0, capacity - len(self.in_use()) - sum(self.tickets.values()))
        while len(self.queue) > room:
            block, _ = self.queue.pop(0)
            self.assumed.discard(block)

    def unuse(self, blocks):
        self.queue = [entry for entry in self.queue if entry[0] is None or entry[0] not in blocks]

    def requeue(self, chain, now):
        self.unuse(chain)
        used = self.in_use()
        self.queue += [(block, now) for block in reversed(chain) if block in self.assumed - used]

    def send(self, ticket, chain, further, capacity):
        self.reserved.append(chain)
        self.unuse(chain)
        self.tickets[ticket] = further
        self.evict(capacity)

    def end(self, ticket, chain, now):
        before = self.in_use()
        self.reserved.remove(chain)
        freed = [block for block in chain if block in before - self.in_use()]
        self.requeue(freed, now)
        del self.tickets[ticket]

    def record(self, chain, capacity, now, answer):
        self.assumed.update(chain)
        self.queue += [(None, now)] * answer
        self.requeue(chain, now)
        self.evict(capacity)

    def forget(self, chain, held, since):
        if held < len(chain):
            behind = {block for block in self.assumed if block[: held + 1] == chain[held]}
            gone = {block for block, at in self.queue if block in behind and at < since}
            self.assumed -= gone
            self.unuse(gone)

    def expire(self, now):
        while self.queue and now - self.queue[0][1] >= LIFETIME_S:
            block, _ = self.queue.pop(0)
            self.assumed.discard(block)

    def hit(self, chain):
        held = self.assumed | self.in_use()
        return next((at for at, block in enumerate(chain) if block not in held), len(chain))


def named(path):
    """A chain of blocks, each named by its path."""
    return [tuple(path[: at + 1]) for at in range(len(path))]


def hashed(chain):
    return [hash(block) for block in chain]


PATHS = st.lists(st.integers(0, 1), max_size=5)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("send", "end", "record", "record", "forget", "expire", "drop")),
            PATHS,
            st.integers(0, 4),
        ),
        max_size=40,
    ),
    st.integers(1, 12),
)
def test_it_holds_what_a_model_block_by_block_holds(steps, capacity):
    index, cache = make()
    plain = Plain()
    running = {}
    for step_number, (step, path, number) in enumerate(steps):
        now, chain = step_number * LIFETIME_S / 12, named(path)
        match step:
            case "send":
                if number not in running:
                    send(index, cache, f"{number}", hashed(chain), len(chain) + number, capacity)
                    plain.send(number, chain, number, capacity)
                    running[number] = chain
            case "end":
                if number in running:
                    chain = running.pop(number)
                    end(index, cache, f"{number}", hashed(chain), now)
                    plain.end(number, chain, now)
            case "record":
                cache.record(W, hashed(chain), capacity, now, number)
                plain.record(chain, capacity, now, number)
            case "forget":
                cache.forget(W, hashed(chain), number, now - LIFETIME_S / 4)
                plain.forget(chain, number, now - LIFETIME_S / 4)
            case "expire":
                cache.expire(now)
                plain.expire(now)
            case "drop":
                if number == 4:
                    cache.drop(W)
                    plain.assumed.clear()
                    plain.queue.clear()
                    # What requests need beside their prompts is forgotten too, until they have ended.
                    plain.tickets = dict.fromkeys(plain.tickets, 0)
        assert cache.blocks(W) == len(plain.assumed)
        assert index.reserved_blocks(W) == len(plain.in_use())
        assert index.entries == len(plain.assumed | plain.in_use())
        for leaf in range(32):
            chain = named([leaf >> bit & 1 for bit in range(5)])
            assert hit(index, hashed(chain)) == plain.hit(chain)
    for number, chain in running.items():
        end(index, cache, f"{number}", hashed(chain), 9e9)
    cache.drop(W)
    assert index.entries == index.reserved_blocks(W) == 0


def test_above_the_ceiling_what_was_used_the_longest_ago_goes_whoever_has_it():
    index, cache = make(max_blocks=6)
    other = worker(1)
    index.add_worker(other, "m", "t")
    cache.record(W, [1, 2, 3], None, 0.0, answer_blocks=50)
    cache.record(other, [7, 8, 9], None, 1.0)
    cache.record(other, [4, 5], None, 2.0)
    assert (index.entries, index.given_up) == (6, 2)
    assert [index.match(chain)[0].blocks for chain in ([1, 2, 3], [7, 8, 9], [4, 5])] == [1, 3, 2]
    index.reserve(W, [1])
    cache.record(other, [10, 11, 12, 13, 14, 15, 16], None, 3.0)
    assert hit(index, [1, 2]) == 1  # a request uses it
    assert index.entries == 6
