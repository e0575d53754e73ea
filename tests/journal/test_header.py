import inspect
from dataclasses import replace

import msgspec
import pytest

from extproc.core.policies import POLICIES
from extproc.core.router import Router
from extproc.core.tenancy import Isolation, TenantBook, TenantPolicy
from extproc.journal.header import FORMAT, Header, JournalError
from tests.support.recorded import HEADER


def test_it_survives_being_written():
    data = msgspec.msgpack.encode(HEADER.pack())
    assert Header.unpack(msgspec.msgpack.decode(data)) == HEADER


def test_everything_a_router_is_built_from_is_in_it():
    """What is added to `Router` must be added to the journal, or replay is not exact."""
    told = set(inspect.signature(Router).parameters) - {
        "new_lease_id",
        "prompt_hashes",
        "event_hashes",
        "last_word",
        "price_all",  # of those that replay beside the recorded one
    }
    assert told == {"policy", "rng", "others", "shadow", "pools", "costs", "settings", "tenants"}


def test_a_router_is_built_as_it_says():
    router = HEADER.build(POLICIES, lambda: "x", lambda *_: (), lambda *_: None)
    assert router.policy == HEADER.policy
    assert router.pools == HEADER.pools
    assert (router.costs, router.settings) == (HEADER.costs, HEADER.settings)


@pytest.mark.parametrize("packed", [None, [], {}, "text", 7])
def test_what_is_no_journal_is_said_to_be_none(packed):
    with pytest.raises(JournalError, match="no Warmroute journal"):
        Header.unpack(packed)


def test_another_format_names_the_version_that_reads_it():
    with pytest.raises(JournalError, match=r"Warmroute 9\.1"):
        Header.unpack(HEADER.pack() | {"warmroute journal": FORMAT + 1, "version": "9.1"})


def test_a_broken_header_is_reported():
    with pytest.raises(JournalError, match="header"):
        Header.unpack(HEADER.pack() | {"seed": "x"})


def test_tenants_are_read_back_as_they_were():
    policy = TenantPolicy(frozenset({"a"}), frozenset({"10.0.0.1"}), Isolation.SALTED, 2.0, 0.5)
    book = TenantBook({"acme": policy}, None)
    data = msgspec.msgpack.encode(replace(HEADER, tenants=book).pack())
    assert Header.unpack(msgspec.msgpack.decode(data)).tenants == book
