"""What any workload must keep, and shorthands to look into one."""

from pathlib import Path

from extproc.sim.sessions import WorkloadOptions


def flat(workload):
    """Every session with its turns in memory."""
    return [(session, list(session.turns)) for session in workload.sessions]


def over(lines, **options):
    """Options that replay these lines."""
    return WorkloadOptions(trace=Path("trace"), read_lines=lambda _: iter(lines), **options)


def hit_share(workload):
    """Share of prompt blocks that some turn before had, in the order of the sessions."""
    seen: set[int] = set()
    hits = total = 0
    for _, turns in flat(workload):
        for turn in turns:
            prefix = turn.blocks[: (turn.prompt_tokens - 1) // workload.block_size]
            found = next((i for i, block in enumerate(prefix) if block not in seen), len(prefix))
            hits, total = hits + found, total + len(prefix)
            seen.update(turn.blocks)
    return hits / total


def check_sound(workload):
    """Blocks are as many as the lengths say, ids are unique, arrivals ascend, and it can be read twice."""
    sessions = flat(workload)
    assert sessions
    assert len({session.id for session, _ in sessions}) == len(sessions)
    arrivals = [session.arrival_s for session, _ in sessions]
    if workload.concurrency is None:
        assert arrivals == sorted(arrivals)
        assert arrivals[0] >= 0
    for _, turns in sessions:
        assert turns
        for turn in turns:
            assert len(turn.blocks) == (turn.prompt_tokens + turn.output_tokens) // workload.block_size
            assert len(set(turn.blocks)) == len(turn.blocks)
            assert turn.think_s >= 0
    assert [(s.id, s.arrival_s, t) for s, t in flat(workload)] == [
        (s.id, s.arrival_s, t) for s, t in sessions
    ]
