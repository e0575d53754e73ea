import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.multipart import MOST_PARTS, form_field

AUDIO = bytes(range(256)) * 20 + b'\r\n--x\r\nname="model"\r\n\r\nno'


def form(*parts, boundary="aBc-1", ended=True):
    """A body as clients send it. `parts`: headers and content."""
    mark = b"--" + boundary.encode()
    body = b"".join(mark + b"\r\n" + head + b"\r\n\r\n" + content + b"\r\n" for head, content in parts)
    return body + mark + (b"--\r\n" if ended else b"")


def field(name, content):
    return (b'Content-Disposition: form-data; name="%b"' % name.encode(), content)


FILE = (
    b'Content-Disposition: form-data; name="file"; filename="name=model.wav"\r\nContent-Type: audio/wav',
    AUDIO,
)
TYPE = "multipart/form-data; boundary=aBc-1"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (TYPE, form(field("model", b"whisper"), FILE)),
        (TYPE, form(FILE, field("language", b"de"), field("model", b"whisper"))),
        ('Multipart/Form-Data; charset=utf-8; Boundary="aBc-1"', form(FILE, field("model", b"whisper"))),
        (TYPE, b"\r\n" + form(field("model", b"whisper"))),
        (TYPE, b"a preamble\r\n" + form(field("model", b"whisper"))),
        (TYPE, form((b"X-Y: 1\r\ncontent-disposition:form-data;name=model", b"whisper"))),
        (TYPE, form(field("model", b"whisper"), field("model", b"another"))),
    ],
)
def test_a_field_is_found_wherever_it_is(content_type, body):
    assert form_field(content_type, body, "model") == "whisper"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("", form(field("model", b"m"))),
        ("application/json", form(field("model", b"m"))),
        ("multipart/form-data", form(field("model", b"m"))),
        ("multipart/form-data; boundary=other", form(field("model", b"m"))),
        (TYPE, b""),
        (TYPE, b"--aBc-1"),
        (TYPE, form(FILE)),
        (TYPE, form(field("models", b"m"))),
        (TYPE, form(FILE) + form(field("model", b"behind the end"))),
        (TYPE, form(field("model", b"m" * 2000))),
        (TYPE, form((b"X: %b\r\n%b" % (b"x" * 5000, field("model", b"")[0]), b"m"))),
        (TYPE, form(*[field("other", b"o")] * MOST_PARTS, field("model", b"m"))),
        (TYPE, form(field("model", b"cut off"))[:70]),
    ],
)
def test_what_is_not_there_is_none(content_type, body):
    assert form_field(content_type, body, "model") is None


def test_a_field_may_be_empty():
    assert form_field(TYPE, form(field("model", b"")), "model") == ""


@given(st.text(), st.binary())
def test_nothing_makes_it_fail(content_type, body):
    form_field(content_type, body, "model")
    form_field(TYPE, body, "model")
