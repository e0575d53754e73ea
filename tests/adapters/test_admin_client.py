import pytest

from extproc.adapters.admin_client import TOKEN_VARIABLE, AdminClient, AdminClientError, token_from
from tests.support.http import Upstream
from tests.support.ports import free_port
from tests.support.watched import Watched

WORD = "s3cret"


async def test_it_asks_for_the_state_and_for_decisions(tmp_path):
    async with Watched(tmp_path) as watched, AdminClient(watched.url) as client:
        watched.ask("a/b ü")
        assert (await client.state())["policy"] == "token-load"
        assert (await client.explained("a/b ü"))["decision"] == watched.lines()[-1]
        assert await client.explained("nobody") is None


async def test_an_address_without_scheme_is_enough(tmp_path):
    async with Watched(tmp_path) as watched, AdminClient(watched.admin.address) as client:
        assert (await client.state())["ready"]


async def test_a_token_is_sent_and_asked_for(tmp_path):
    async with Watched(tmp_path, token=WORD) as watched:
        async with AdminClient(watched.url, WORD) as client:
            assert (await client.state())["ready"]
        async with AdminClient(watched.url) as client:
            with pytest.raises(AdminClientError, match=rf"--token-file.*{TOKEN_VARIABLE}"):
                await client.state()


async def test_nobody_there_says_what_to_check():
    async with AdminClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(AdminClientError, match=r"warmroute serve.*admin\.listen"):
            await client.state()


async def test_somebody_else_there_is_noticed():
    async with Upstream() as other, AdminClient(f"http://{other.endpoint}") as client:
        with pytest.raises(AdminClientError, match="is not a Warmroute"):
            await client.state()


async def test_an_address_that_is_none_is_named():
    async with AdminClient("http://[bad") as client:
        with pytest.raises(AdminClientError, match="bad"):
            await client.state()


def test_the_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert token_from(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, "from-environment")
    assert token_from(None) == "from-environment"
    (tmp_path / "token").write_text("from-file\n")
    assert token_from(tmp_path / "token") == "from-file"
    with pytest.raises(AdminClientError, match="missing"):
        token_from(tmp_path / "missing")
