import ssl
from types import SimpleNamespace

import aiohttp
import pytest

from extproc.adapters.http_errors import in_words
from tests.support.ports import free_port


async def test_a_refused_connection_is_called_that():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError) as caught:
            await session.get(f"http://127.0.0.1:{free_port()}/")
    assert "refused" in in_words(caught.value)
    assert "ssl" not in in_words(caught.value)


def test_a_name_that_is_none_keeps_the_resolver_s_words():
    where = SimpleNamespace(host="nowhere", port=80, ssl=True)
    error = aiohttp.ClientConnectorDNSError(where, OSError(-2, "Name or service not known"))
    assert in_words(error) == "Name or service not known"


def test_what_tls_says_is_not_taken_for_the_system_s_numbers():
    where = SimpleNamespace(host="127.0.0.1", port=80, ssl=True)
    error = aiohttp.ClientConnectorSSLError(
        where, ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version")
    )
    assert "WRONG_VERSION_NUMBER" in in_words(error)


def test_others_say_what_they_say_or_what_they_are():
    assert in_words(ValueError("odd")) == "odd"
    assert in_words(TimeoutError()) == "TimeoutError"
