from extproc.protocol.explanation_text import as_text
from tests.protocol.test_explanation import COLD, WARM, candidate, line


def test_candidates_stand_in_columns_with_the_winner_marked():
    text = as_text(line(WARM, COLD))
    head, first, second = text.split("Candidates, best first (ms, tokens)\n")[1].splitlines()[:3]
    assert first.startswith("> a:1")
    assert second.startswith("  b:1")
    for name, cell, other in (
        ("total", "35.0", "115.0"),
        ("prefill", "20.0", "100.0"),
        ("cached", "800", "0"),
    ):
        end = head.index(name) + len(name)
        assert first[:end].endswith(cell)
        assert second[:end].endswith(other)


def test_every_part_of_the_story_is_there_once():
    text = as_text(line(WARM, COLD, shadow={"x": {"worker": "b:1", "decision": "y", "total_ms": 1.0}}))
    for title in ("Why\n", "What happened\n", "Other policies\n"):
        assert text.count(title) == 1


def test_many_candidates_are_cut_unless_all_are_wanted():
    many = line(WARM, *(candidate(f"w{n}:1") for n in range(40)))
    assert "... and 29 more" in as_text(many)
    assert "w39:1" not in as_text(many)
    assert "w39:1" in as_text(many, None)


def test_what_is_not_known_is_a_question_mark():
    text = as_text(line({"worker": "a:1"}, {"worker": "b:1"}))
    assert "?" in text
    assert "never" in text


def test_offloaded_tokens_are_shown_apart():
    assert "800+64" in as_text(line({**WARM, "offloaded_tokens": 64}, COLD))
