from random import Random

from extproc.demo.workload import WorkloadSettings, build, prose


def test_the_same_seed_gives_the_same_texts():
    assert build(WorkloadSettings()) == build(WorkloadSettings())
    assert build(WorkloadSettings(seed=1)) != build(WorkloadSettings(seed=2))


def test_questions_share_their_documents_text_and_chats_have_turns():
    settings = WorkloadSettings(documents=3, questions=4, chats=2, turns=5)
    workload = build(settings)
    documents = {d.system for d in workload.dialogues if d.name.startswith("document")}
    assert len(documents) == 3
    assert workload.requests == 3 * 4 + 2 * 5
    assert sorted(len(d.questions) for d in workload.dialogues) == [1] * 12 + [5, 5]


def test_dialogues_are_interleaved_not_sorted():
    names = [d.name for d in build(WorkloadSettings()).dialogues]
    assert names != sorted(names)


def test_prose_has_the_length_asked_for():
    assert len(prose(Random(1), 500).split()) == 500
