import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.journal.symbols import SymbolReader, SymbolWriter

SYMBOLS = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1), st.binary(max_size=3))


@given(st.lists(st.lists(SYMBOLS, max_size=12), max_size=30), st.integers(1, 20))
def test_what_is_read_is_what_was_written(sequences, limit):
    writer, reader = SymbolWriter(limit), SymbolReader(limit)
    for sequence in sequences:
        assert reader.unpack(writer.pack(sequence)) == tuple(sequence)


def test_what_comes_again_is_short():
    writer = SymbolWriter()
    chain = list(range(10**18, 10**18 + 500))
    assert writer.pack(chain) == chain
    assert writer.pack(chain[:300]) == [[0, 300]]
    assert writer.pack([*chain[:300], 5, 6]) == [[0, 300], 5, 6]
    assert writer.pack([*chain, 5, 6]) == [[0, 502]]


def test_memory_is_bounded():
    writer, reader = SymbolWriter(100), SymbolReader(100)
    for start in range(0, 10_000, 50):
        reader.unpack(writer.pack(range(start, start + 50)))
    assert len(writer._numbers) <= 150
    assert len(reader._symbols) <= 150


@pytest.mark.parametrize("run", [[0, 1], [-1, 1], [0, -1]])
def test_what_was_never_named_is_refused(run):
    with pytest.raises(ValueError, match="never named"):
        SymbolReader().unpack([run])
