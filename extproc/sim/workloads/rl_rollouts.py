"""`rl-rollouts`: asynchronous multi-turn reinforcement-learning rollouts with stragglers.

Definition. Each step runs 8 rollouts of 10 turns, and 16 rollouts run at once, so two steps overlap. A
rollout starts with 2,000 input tokens and every turn generates 1,000; the prompt of a turn is that of the
turn before plus what it generated. In each step two rollouts, drawn by the seed, generate 8,000 in their last
turn. A step begins when the step before the last has ended.

The definition does not say whether the rollouts of a step start alike. Here they do (`group_prompt`): they
are attempts at one problem, as in group-relative training, and no two steps share anything. The workload
`rl-rollouts-distinct` is the same with a problem of its own for every rollout.

Clients send no output limit: what a rollout will generate is not known beforehand. There is no trace.
"""

from collections.abc import Iterator
from functools import partial
from random import Random

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Turn, Workload, WorkloadOptions, limited
from extproc.sim.workloads.history import History, key_of
from extproc.sim.workloads.lazily import Lazily


def rl_rollouts(
    options: WorkloadOptions,
    *,
    steps: int = 10,
    rollouts: int = 8,
    turns: int = 10,
    input_tokens: int = 2000,
    turn_tokens: int = 1000,
    stragglers: int = 2,
    straggler_tokens: int = 8000,
    concurrency: int = 16,
    group_prompt: bool = True,
    block_size: int = 16,
) -> Workload:
    """RL training: steps of 8 rollouts of 10 turns, two stragglers per step, 16 rollouts at once.

    See the module's docstring.

    Raises:
        WarmrouteError: a trace is given.
    """
    if options.trace is not None:
        raise WarmrouteError("rl-rollouts is defined, not recorded: it takes no trace")
    name = "rl-rollouts" if group_prompt else "rl-rollouts-distinct"

    def rollout(step: int, index: int, last: int) -> Iterator[Turn]:
        problem = key_of(options.seed, name, step, "group" if group_prompt else index)
        history = History(block_size, problem)
        history.extend(problem, input_tokens)
        for turn in range(turns):
            output = last if turn == turns - 1 else turn_tokens
            prompt = history.tokens
            history.extend(key_of(step, index, turn), output)
            yield Turn(prompt, output, history.blocks[:])

    def sessions() -> Iterator[Session]:
        rng = Random(options.seed)  # noqa: S311 - a simulation
        for step in range(steps):
            slow = set(rng.sample(range(rollouts), stragglers))
            for index in range(rollouts):
                last = straggler_tokens if index in slow else turn_tokens
                yield Session(
                    id=f"step{step}-rollout{index}",
                    turns=Lazily(partial(rollout, step, index, last)),
                    group="straggler" if index in slow else "regular",
                    step=step,
                )

    return Workload(
        name=name,
        block_size=block_size,
        sessions=Lazily(lambda: sessions() if options.limit is None else limited(sessions(), options.limit)),
        concurrency=concurrency,
        steps_in_flight=max(1, concurrency // rollouts),
        rollouts=True,
        description=f"{steps} steps of {rollouts} rollouts of {turns} turns, {stragglers} stragglers a step",
    )


def rl_rollouts_distinct(options: WorkloadOptions) -> Workload:
    """The same RL rollouts, each with a problem of its own: nothing is shared between rollouts."""
    return rl_rollouts(options, group_prompt=False)
