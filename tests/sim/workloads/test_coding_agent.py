import json
from itertools import pairwise

import pytest

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import WorkloadOptions
from extproc.sim.workloads.coding_agent import coding_agent
from tests.sim.workloads.support import flat, hit_share, over


def request(t, tokens, output, keep, add, **more):
    return {"t": t, "in": tokens, "out": output, "keep": keep, "add": add, **more}


def session(name, *requests):
    return json.dumps({"id": name, "model": "m", "block_size": 64, "requests": requests})


PLAIN = session(
    "plain",
    request(0.0, 200, 30, 0, [[1, 3]], api=5.0),
    request(9.0, 300, 64, 3, [[4, 1]], api=2.0),  # keeps all, holds the output: 300 >= 230
    request(411.0, 400, 10, 3, [[7, 3]]),  # rewrites the last stretch, though it could hold the output
)


def turns_of(line, **parameters):
    return flat(coding_agent(over([line]), **parameters))[0][1]


@pytest.mark.parametrize("block_size", [16, 64])
def test_an_answer_is_found_again_in_the_next_prompt_that_quotes_it(block_size):
    first, second, third = turns_of(PLAIN, block_size=block_size)
    # 230 tokens of the first turn, of which the ids of the second name 256.
    assert second.blocks[: len(first.blocks)] == first.blocks
    # The third keeps 192 tokens; what follows in the second is its own.
    kept = 192 // block_size
    assert third.blocks[:kept] == second.blocks[:kept]
    assert not set(third.blocks[kept:]) & set(second.blocks[kept:])


def test_an_answer_that_the_next_prompt_cannot_hold_is_the_turn_s_own():
    line = session("s", request(0, 200, 300, 0, [[1, 3]]), request(1, 460, 1, 3, [[4, 4]]))
    first, second = turns_of(line, block_size=64)
    assert first.blocks[:3] == second.blocks[:3]
    assert not set(first.blocks[3:]) & set(second.blocks[3:])


def test_pauses_are_the_trace_s_up_to_a_limit():
    assert [turn.think_s for turn in turns_of(PLAIN)] == [0.0, 4.0, 60.0]
    assert [turn.think_s for turn in turns_of(PLAIN, max_think_s=1e9)] == [0.0, 4.0, 400.0]


def test_sub_agents_take_their_turns_in_between_and_keep_their_own_history():
    line = session(
        "s",
        request(0.0, 128, 1, 0, [[1, 2]]),
        request(10.0, 192, 1, 2, [[3, 1]]),
        request(5.0, 128, 1, 0, [[90, 2]], agent="a"),
        request(7.0, 192, 1, 2, [[92, 1]], agent="a"),
    )
    main1, sub1, sub2, main2 = turns_of(line)
    assert [t.think_s for t in (main1, sub1, sub2, main2)] == [0.0, 5.0, 2.0, 3.0]
    assert sub2.blocks[:2] == sub1.blocks
    assert main2.blocks[:2] == main1.blocks
    assert not set(main2.blocks) & set(sub2.blocks)


def test_ids_mean_nothing_beyond_their_session():
    one, two = (json.dumps({**json.loads(PLAIN), "id": name}) for name in "ab")
    (_, first), (_, second) = flat(coding_agent(over([one, two])))
    assert not set(first[-1].blocks) & set(second[-1].blocks)


def test_a_session_ends_before_it_outgrows_the_model():
    assert len(turns_of(PLAIN, max_context_tokens=339)) == 1
    assert len(turns_of(PLAIN, max_context_tokens=364)) == 2
    assert len(turns_of(PLAIN, max_context_tokens=410)) == 3
    assert flat(coding_agent(over([PLAIN]), max_context_tokens=200)) == []


def test_parts_take_every_nth_session():
    lines = [json.dumps({**json.loads(PLAIN), "id": str(number)}) for number in range(7)]
    parts = [[s.id for s, _ in flat(coding_agent(over(lines, part=(index, 3))))] for index in range(3)]
    assert parts == [["0", "3", "6"], ["1", "4"], ["2", "5"]]


def test_a_request_that_keeps_what_never_was_is_refused():
    with pytest.raises(WarmrouteError, match="request 0 of session s"):
        turns_of(session("s", request(0, 200, 30, 1, [[1, 2]])))


def test_the_stand_in_repeats_almost_everything_inside_uneven_sessions():
    workload = coding_agent(WorkloadOptions())
    assert workload.concurrency == 16
    assert hit_share(workload) > 0.95
    lengths = sorted(len(turns) for _, turns in flat(workload))
    assert lengths[-1] > 3 * lengths[0]
    for _, turns in flat(workload):
        assert all(after.prompt_tokens > before.prompt_tokens for before, after in pairwise(turns))
