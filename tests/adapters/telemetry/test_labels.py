from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.telemetry.labels import MAX_VALUES, OTHER, FewValues, ServedModels


@given(st.lists(st.text(max_size=3)), st.integers(1, 5))
def test_there_are_never_more_values_than_allowed_and_a_value_keeps_its_label(values, limit):
    labels = FewValues(limit)
    given_out = {}
    for value in values:
        label = labels.of(value)
        assert label in (value, OTHER)
        assert given_out.setdefault(value, label) == label
    assert len(set(given_out.values()) - {OTHER}) <= limit


def test_a_model_is_named_when_a_pool_serves_it_or_an_engine_has_answered_for_it():
    models = ServedModels(lambda name: name == "base")
    assert models.label("base") == "base"
    assert models.label("adapter") == OTHER
    models.served("adapter")
    assert models.label("adapter") == "adapter"


def test_engines_that_answer_for_any_name_do_not_make_labels_without_end():
    models = ServedModels(lambda _name: False)
    for number in range(2 * MAX_VALUES):
        models.served(f"model-{number}")
    named = {models.label(f"model-{number}") for number in range(2 * MAX_VALUES)}
    assert len(named) == MAX_VALUES + 1
