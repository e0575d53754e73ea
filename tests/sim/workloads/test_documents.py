from collections import Counter

from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.documents import documents
from tests.sim.workloads.support import flat


def test_questions_share_their_document_and_nothing_else():
    workload = documents(WorkloadOptions(), documents=3, document_tokens=1600, questions=60)
    by_document: dict[int, list[list[int]]] = {}
    for _, (turn,) in flat(workload):
        assert turn.prompt_tokens == 1660
        by_document.setdefault(turn.blocks[0], []).append(turn.blocks)
    assert len(by_document) == 3
    for questions in by_document.values():
        assert len({tuple(blocks[:100]) for blocks in questions}) == 1
        tails = [block for blocks in questions for block in blocks[100:]]
        assert len(set(tails)) == len(tails)


def test_some_documents_are_far_more_popular():
    workload = documents(WorkloadOptions(), questions=2000, document_tokens=16, zipf=1.0)
    asked = Counter(turn.blocks[0] for _, (turn,) in flat(workload)).most_common()
    assert asked[0][1] > 5 * asked[-1][1]
