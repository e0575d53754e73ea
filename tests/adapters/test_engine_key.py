import asyncio
import traceback

import pytest

from extproc.adapters.engine_key import EngineKey, EngineKeyError, headers_for, read_key, refusal

MODELS = "/v1/models"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "key"
    path.write_text("old-key\n")
    return path


def sent(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read {}: No such file or directory"),
        (b" \n", "{} is empty; put the engines' --api-key there"),
        (b"a-secret\nanother", "{} holds no key: it must be one line of printable ASCII"),
        ("a-secret-ü".encode(), "{} holds no key: it must be one line of printable ASCII"),
        (b"a-secret\xff", "cannot read {}: it is not UTF-8"),
    ],
)
def test_a_file_that_holds_no_key_is_named_and_its_content_is_not_shown(tmp_path, content, expected):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EngineKeyError) as found:
        read_key(path)
    assert str(found.value).startswith(expected.format(path))
    assert "a-secret" not in "".join(traceback.format_exception(found.value))


@pytest.mark.parametrize(
    ("path", "guarded"),
    [
        ("/v1/models", True),
        ("/v1/chat/completions/render", True),
        ("/v2/embed", True),
        ("/inference/v1/generate", True),
        ("/cohere/v2/chat", True),
        ("/metrics", False),
        ("/metrics/", False),
        ("/health", False),
        ("/tokenize", False),
    ],
)
def test_it_goes_only_where_it_is_asked_for(file, path, guarded):
    key = EngineKey(file)
    assert key.headers(path) == headers_for(key, path) == (sent("old-key") if guarded else {})
    assert headers_for(None, path) == {}


def test_it_does_not_show_itself(file):
    assert "old-key" not in repr(EngineKey(file))
    assert "old-key" not in repr(refusal(401, EngineKey(file)))


async def test_it_is_read_again_after_a_refusal_and_once_in_a_while_only(file):
    clock = Clock()
    key = EngineKey(file, pause_s=5.0, clock=clock)
    file.write_text("new-key")
    clock.now += 4.9
    assert not await key.renewed(sent("old-key"))
    clock.now += 0.2
    assert await key.renewed(sent("old-key"))
    assert key.headers(MODELS) == sent("new-key")
    file.write_text("newer-key")
    assert not await key.renewed(sent("new-key"))
    assert await key.renewed(sent("old-key"))  # refused before it was known that there is another
    assert key.headers(MODELS) == sent("new-key")


async def test_of_many_refusals_at_once_one_has_it_read(file, monkeypatch):
    clock = Clock()
    key = EngineKey(file, pause_s=1.0, clock=clock)
    read = []
    monkeypatch.setattr(
        "extproc.adapters.engine_key.read_key", lambda path: read.append(path) or path.read_text()
    )
    file.write_text("new-key")
    clock.now += 2.0
    assert await asyncio.gather(*[key.renewed(sent("old-key")) for _ in range(20)]) == [True] * 20
    assert read == [file]


async def test_a_file_that_is_gone_leaves_the_key_and_is_told(file):
    clock = Clock()
    key = EngineKey(file, pause_s=1.0, clock=clock)
    file.unlink()
    clock.now += 2.0
    assert not await key.renewed(sent("old-key"))
    assert key.headers(MODELS) == sent("old-key")
    assert f"cannot read {file}" in refusal(401, key).advice
    file.write_text("new-key")
    clock.now += 2.0
    assert await key.renewed(sent("old-key"))
    assert "cannot read" not in refusal(401, key).advice


async def test_what_was_sent_without_a_key_is_not_sent_again(file):
    key = EngineKey(file, pause_s=0.0)
    file.write_text("new-key")
    assert not await key.renewed({})


def test_a_refusal_says_which_setting_is_missing_or_wrong(file):
    assert "we have none" in refusal(401, None).text
    assert "`api_key_file`" in refusal(401, None).advice
    found = refusal(403, EngineKey(file))
    assert "answers 403" in found.text
    assert "`api_key_file`" in found.text
    assert str(file) in found.advice
