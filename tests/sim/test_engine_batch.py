import pytest

from extproc.sim.engine_batch import ActiveSequence, Step
from extproc.sim.engine_types import EngineRequest


def sequence(prompt=10, output=5, computed=0, known=None):
    one = ActiveSequence(EngineRequest("r", prompt, output, ()), 3.0)
    one.computed = computed
    one.known = prompt if known is None else known
    return one


def test_a_new_sequence_knows_its_prompt_and_nothing_is_computed():
    new = sequence()
    assert (new.known, new.total, new.computed, new.arrived_at) == (10, 15, 0, 3.0)
    assert (new.blocks, new.admitted_at, new.gone) == ([], None, False)


def test_a_step_counts_prefill_and_its_pairs_of_tokens():
    step, one = Step(), sequence(computed=4)
    step.add(one, 6)
    assert (step.prefill, step.decodes, step.context) == (6, 0, 0)
    assert step.pairs == sum(range(4, 10)), "each token attends to all before it"
    assert (step.sequences, one.scheduled) == ([one], 6)


def test_a_token_after_the_prompt_is_a_decode():
    step = Step()
    step.add(sequence(computed=12, known=13), 1)
    assert (step.decodes, step.context, step.prefill, step.pairs) == (1, 12, 0, 0.0)


@pytest.mark.parametrize(("computed", "tokens"), [(9, 1), (10, 2)])
def test_the_last_of_a_prompt_and_what_is_recomputed_is_prefill(computed, tokens):
    step = Step()
    step.add(sequence(computed=computed, known=12), tokens)
    assert (step.prefill, step.decodes) == (tokens, 0)
