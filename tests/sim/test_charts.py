import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.charts import COLOURS, Axis, axis, band, bars, lines, number

X = Axis("x & y", 0.0, 10.0)
Y = Axis("<ms>", 1.0, 1000.0, log=True)


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)  # noqa: S314 - our own


def elements(svg: str, tag: str) -> list[ET.Element]:
    return list(parsed(svg).iter(tag))


def test_a_line_goes_from_corner_to_corner():
    svg = lines("t", X, Y, [("a", [(0.0, 1.0), (10.0, 1000.0)])])
    (line,) = elements(svg, "polyline")
    assert line.get("points") == "64.0,256.0 704.0,12.0"


def test_more_series_than_colours_are_dashed():
    svg = lines("t", X, Y, [(f"s{at}", [(0.0, 1.0), (1.0, 2.0)]) for at in range(COLOURS + 1)])
    made = elements(svg, "polyline")
    assert [line.get("stroke-dasharray") is not None for line in made] == [False] * COLOURS + [True]
    assert made[0].get("class") == made[-1].get("class")


def test_names_are_escaped():
    svg = lines('"<t>', X, Y, [("<a&b>", [(0.0, 1.0)])], dots=True)
    assert parsed(svg).get("aria-label") == '"<t>'
    assert elements(svg, "title")[0].text == "<a&b>"


def test_bars_are_as_long_as_their_values():
    svg = bars("t", "share", [("a", 0.5), ("b", 1.0), ("c", 0.0)], 1.0)
    a, b, c = (float(rect.get("width")) for rect in elements(svg, "rect"))
    assert (a * 2, c) == (b, 0.0)


def test_a_band_closes():
    low, high = [(0.0, 1.0), (10.0, 1.0)], [(0.0, 10.0), (10.0, 10.0)]
    svg = band("t", X, Y, low, low, high)
    assert len(elements(svg, "polygon")[0].get("points").split()) == 4


@given(st.lists(st.floats(0, 1e9), max_size=5), st.booleans())
def test_an_axis_holds_its_values_and_has_ticks(values, log):
    made = axis("v", values, log=log)
    assert made.low < made.high
    assert made.ticks()
    assert all(0 <= made.share(value) <= 1 for value in values)
    assert all(math.isfinite(tick) for tick in made.ticks())


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (1234.5, "1,234"), (0.12345, "0.123"), (12.0, "12")])
def test_numbers_are_short(value, text):
    assert number(value) == text
