from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.names import shown


def test_names_stay_what_they_are():
    for name in ("", "Qwen/Qwen3-8B", "größe", "a b", "模型"):
        assert shown(name) == name


def test_what_a_terminal_would_obey_is_not_shown():
    assert shown("m\x1b[2J\r\n\x07\x9b\x7f") == "m?[2J?????"
    assert shown("a\ud800b") == "a?b"
    assert shown("x" * 300) == "x" * 256


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_can_be_written(text):
    written = shown(text)
    written.encode()
    assert len(written) <= 256
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in written)
    assert shown(written) == written
