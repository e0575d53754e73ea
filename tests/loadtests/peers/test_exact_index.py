from extproc.core.types import AllBlocksCleared
from loadtests.peers.exact_index import ExactIndex
from tests.loadtests.peers.support import document, removed, stored


def test_overlap_is_the_unbroken_run_from_the_beginning():
    index = ExactIndex(2)
    index.apply(0, [stored(document(0, 3)), stored(document(0, 6)[4:])])
    assert index.overlap(0, document(0, 6)) == 3
    assert index.overlap(1, document(0, 6)) == 0
    assert index.size(0) == 5


def test_a_block_is_gone_when_its_last_copy_is():
    index = ExactIndex(1)
    index.apply(0, [stored([1]), stored([1]), removed([1])])
    assert index.overlap(0, [1]) == 1
    index.apply(0, [removed([1]), removed([1])])
    assert index.overlap(0, [1]) == 0
    index.apply(0, [stored([1, 2]), AllBlocksCleared()])
    assert index.size(0) == 0
