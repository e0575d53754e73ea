from collections import Counter

import pytest

from loadtests.peers.llmd_default import LlmdDefault
from tests.loadtests.peers.support import Asking, document, facts, scraped


def test_scores_are_the_weighted_sum():
    router = LlmdDefault(facts(), 0)
    for worker, page in enumerate((scraped(0, 0.5), scraped(4, 0.25), scraped(10, 0.0))):
        router.on_metrics(worker, page, 0.0)
    chunks = router.index.chunks(Asking(router).request(document(0, 12), 8))  # 200 tokens: 4 chunks
    router.index.add(chunks[:3], 1, None)
    assert router.scores(chunks) == pytest.approx(
        [
            2 * 1.0 + 2 * 0.5 + 3 * 0.0,
            2 * 0.6 + 2 * 0.75 + 3 * 0.75,
            2 * 0.0 + 2 * 1.0 + 3 * 0.0,
        ]
    )


def test_equal_queues_count_alike():
    router = LlmdDefault(facts(), 0)
    for worker in range(3):
        router.on_metrics(worker, scraped(7, 0.5), 0.0)
    assert router.scores([1]) == [3.0, 3.0, 3.0]


def test_equals_are_chosen_by_chance():
    asking = Asking(LlmdDefault(facts(), 0))
    sent = Counter(asking.ask(document(number, 8)) for number in range(300))
    assert min(sent.values()) > 60


def test_a_burst_with_one_prefix_lands_on_one_worker_until_the_next_scrape():
    asking = Asking(LlmdDefault(facts(), 0))
    assert len({asking.ask(document(0, 40)) for _ in range(50)}) == 1


def test_a_long_queue_outweighs_a_short_match():
    router = LlmdDefault(facts(2), 0)
    asking = Asking(router)
    home = asking.ask(document(0, 40))
    router.on_metrics(home, scraped(5, 0.8), 0.0)
    # The warm one gets 0 for its queue, 0.4 for memory and 2.73 for the match; the cold one 2, 2 and 0.
    assert asking.ask(document(0, 40)) == 1 - home


def test_metrics_come_every_50_ms():
    assert LlmdDefault.scrape_interval_s == 0.05
