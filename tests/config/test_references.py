import pytest

from extproc.config import ConfigError, parse


def error_of(text):
    with pytest.raises(ConfigError) as caught:
        parse(text, "warmroute.yaml")
    return str(caught.value)


def test_pool_names_must_differ():
    pool = "{name: a, discovery: {static: ['h:1']}}"
    assert "pool names must differ" in error_of(f"pools: [{pool}, {pool}]")


def test_a_model_belongs_to_one_pool():
    one = "{name: a, model: {names: [m]}, discovery: {static: ['h:1']}}"
    two = "{name: b, model: {names: [m]}, discovery: {static: ['h:2']}}"
    assert "model 'm' is in two pools: a and b" in error_of(f"pools: [{one}, {two}]")
