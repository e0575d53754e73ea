import json

import pytest

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.mooncake import mooncake_conversation, mooncake_synthetic
from tests.sim.workloads.support import flat, hit_share, over


def line(at_ms, tokens, output, ids):
    return json.dumps({"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": ids})


TRACE = [
    line(0, 1200, 100, [0, 1, 2]),
    line(500, 1600, 50, [0, 1, 3, 4]),
    line(4000, 1200, 100, [0, 1, 2]),
    line(9000, 700, 1, [5, 6]),
]


@pytest.mark.parametrize("block_size", [16, 64, 48, 512, 1000])
def test_requests_share_the_stretches_their_ids_share_at_any_block_size(block_size):
    first, second, again, other = (
        turns[0].blocks for _, turns in flat(mooncake_conversation(over(TRACE), block_size=block_size))
    )
    shared = 1024 // block_size
    assert first[:shared] == second[:shared] == again[:shared]
    assert not set(first[shared:]) & set(second[shared:])
    assert not set(first) & set(other)


def test_the_last_shorter_stretch_is_never_shared_even_if_its_id_is():
    turns = [turns[0] for _, turns in flat(mooncake_conversation(over(TRACE), block_size=16))]
    assert not set(turns[0].blocks[64:]) & set(turns[2].blocks[64:])


def test_times_and_lengths_are_the_trace_s():
    workload = mooncake_synthetic(over(TRACE))
    sessions = flat(workload)
    assert [session.arrival_s for session, _ in sessions] == [0.0, 0.5, 4.0, 9.0]
    assert [(t.prompt_tokens, t.output_tokens) for _, (t,) in sessions] == [
        (1200, 100),
        (1600, 50),
        (1200, 100),
        (700, 1),
    ]
    assert workload.rate == pytest.approx(3 / 9)


@pytest.mark.parametrize("bad", ["{", line(0, 1200, 1, [0, 1]), '{"timestamp": 0}', line(0, 5, 1, ["x"])])
def test_a_bad_line_is_named(bad):
    with pytest.raises(WarmrouteError, match="line 2"):
        mooncake_conversation(over([TRACE[0], bad]))


def test_stand_ins_resemble_the_traces():
    """The traces: 12,031 requests at 3.4 a second with 37 % repeated; 3,993 at 3.9 with 65 %."""
    for seed in range(3):
        conversation = mooncake_conversation(WorkloadOptions(seed=seed))
        assert conversation.rate == pytest.approx(3.4, rel=0.2)
        assert hit_share(conversation) == pytest.approx(0.37, abs=0.12)
        synthetic = mooncake_synthetic(WorkloadOptions(seed=seed))
        assert synthetic.rate == pytest.approx(3.9, rel=0.2)
        assert hit_share(synthetic) == pytest.approx(0.65, abs=0.12)
