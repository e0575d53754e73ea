import yaml
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.envoy_bootstrap import (
    BodyMode,
    EdsServiceWorkers,
    EnvoySettings,
    StaticWorkers,
    bootstrap,
    to_yaml,
)
from extproc.adapters.envoy_comments import NOTES, annotate

keys = st.sampled_from(["name", "admin", "node", "route", "timeout", "circuit_breakers", "http_filters"])
scalars = st.one_of(
    st.integers(), st.booleans(), st.text(max_size=8), st.sampled_from(["envoy.filters.http.ext_proc"])
)
documents = st.dictionaries(
    keys,
    st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
    ),
    min_size=1,
)


@given(documents)
def test_comments_never_change_what_the_text_means(document):
    text = yaml.safe_dump(document, sort_keys=False, width=1_000_000)
    assert yaml.safe_load(annotate(text)) == document


# Only a sample has such a cluster; `test_envoy_samples` compares it.
ORIGINAL_DST = dict(NOTES)["clusters", "original_dst_lb_config"].splitlines()


def test_every_note_finds_its_place_once():
    text = to_yaml(
        bootstrap(
            EnvoySettings(
                workers=EdsServiceWorkers(), first_token_observer=True, trace_collector="10.0.0.9:4317"
            )
        )
    )
    for _, note in NOTES:
        for line in note.splitlines():
            assert text.count(f"# {line}\n") == (line not in ORIGINAL_DST), line


def test_a_comment_stands_above_its_value_at_its_indent():
    text = "a:\n- name: x\n  admin: 1\nadmin:\n  port: 2\n"
    note = dict(NOTES)[("admin",)]
    assert annotate(text) == f"a:\n- name: x\n  # {note}\n  admin: 1\nadmin:\n  port: 2\n"


def test_what_does_not_hold_in_duplex_mode_is_not_said():
    settings = EnvoySettings(workers=StaticWorkers(("10.0.0.1:1",)), body_mode=BodyMode.FULL_DUPLEX_STREAMED)
    assert "the request goes on" not in to_yaml(bootstrap(settings))
