import asyncio
import socket

import pytest

from extproc.adapters.name_resolution import NamedMembers, ResolutionSettings, at_address, system_resolver
from extproc.core.types import Member
from tests.support.waiting import until

QUICK = ResolutionSettings(interval_s=0.005, timeout_s=5.0, drop_after=3)


class Names:
    """A resolver under the test's control, and what came of it."""

    def __init__(self, settings=QUICK, **answers):
        self.answers, self.lookups, self.published, self.errors = answers, 0, [], []
        self.named = NamedMembers(self.published.append, self.errors.append, settings, self.resolve)

    async def resolve(self, name):
        self.lookups += 1
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return ["10.0.0.99"]
        return answer

    async def rounds(self, count=4):
        """Wait until `count` further lookups have been published or reported."""
        target = self.lookups + count
        await until(lambda: self.lookups >= target)

    @property
    def endpoints(self):
        return [member.endpoint for member in self.published[-1]]

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.named.close()


async def test_addresses_are_published_at_once():
    async with Names() as names:
        names.named.set([Member("10.0.0.2:1"), Member("[fd00::1]:1")])
        assert names.endpoints == ["10.0.0.2:1", "[fd00::1]:1"]
        assert names.lookups == 0


async def test_a_name_becomes_its_addresses_and_keeps_its_description():
    async with Names(pool=["10.0.0.10", "10.0.0.9", "fd00::1"]) as names:
        names.named.set([Member("pool:80", pool="chat", dp_size=2), Member("10.0.0.9:80", pool="other")])
        await until(lambda: names.published)
        assert names.published[0] == (
            Member("10.0.0.9:80", pool="chat", dp_size=2),
            Member("10.0.0.10:80", pool="chat", dp_size=2),
        )


async def test_names_are_looked_up_again():
    async with Names(pool=["10.0.0.1"]) as names:
        names.named.set([Member("pool:80")])
        await until(lambda: names.published)
        names.answers["pool"] = ["10.0.0.1", "10.0.0.2"]
        await until(lambda: names.endpoints == ["10.0.0.1:80", "10.0.0.2:80"])


async def test_an_address_that_flaps_stays():
    async with Names(pool=["10.0.0.1", "10.0.0.2"]) as names:
        names.named.set([Member("pool:80")])
        await until(lambda: names.published)
        answers = [["10.0.0.1"], ["10.0.0.2"], ["10.0.0.1"], ["10.0.0.2"]]

        async def resolve(name):
            names.lookups += 1
            return answers[names.lookups % 4]

        names.named._resolve = resolve
        await names.rounds(8)
        assert {tuple(sorted(one.endpoint for one in published)) for published in names.published} == {
            ("10.0.0.1:80", "10.0.0.2:80")
        }


async def test_an_address_that_stays_away_leaves():
    async with Names(pool=["10.0.0.1", "10.0.0.2"]) as names:
        names.named.set([Member("pool:80")])
        await until(lambda: names.published)
        names.answers["pool"] = ["10.0.0.1"]
        await until(lambda: names.endpoints == ["10.0.0.1:80"])


@pytest.mark.parametrize("failure", [OSError("server is down"), [], ValueError("bad name")])
async def test_a_failed_or_empty_lookup_keeps_the_old_addresses_and_is_reported_once(failure):
    async with Names(pool=["10.0.0.1"]) as names:
        names.named.set([Member("pool:80")])
        await until(lambda: names.published)
        names.answers["pool"] = failure
        await names.rounds(8)
        assert names.endpoints == ["10.0.0.1:80"]
        assert len(names.errors) == 1
        assert names.errors[0].startswith("cannot resolve pool: ")
        names.answers["pool"] = ["10.0.0.1"]
        await names.rounds()
        names.answers["pool"] = failure
        await until(lambda: len(names.errors) == 2)


async def test_an_empty_answer_can_be_believed():
    settings = ResolutionSettings(interval_s=0.005, drop_after=2, empty_is_failure=False)
    async with Names(settings, pool=["10.0.0.1"]) as names:
        names.named.set([Member("pool:80")])
        await until(lambda: names.published)
        names.answers["pool"] = []
        await until(lambda: names.endpoints == [])
        assert not names.errors


async def test_one_name_that_fails_does_not_hide_another():
    async with Names(good=["10.0.0.1"], bad=OSError("no")) as names:
        names.named.set([Member("bad:80"), Member("good:80")])
        await until(lambda: names.published)
        assert names.endpoints == ["10.0.0.1:80"]


async def test_a_lookup_that_hangs_is_reported_not_repeated_and_used_when_it_ends():
    settings = ResolutionSettings(interval_s=0.005, timeout_s=0.01)
    hanging = asyncio.Event()
    async with Names(settings, pool=hanging) as names:
        names.named.set([Member("pool:80")])
        await until(lambda: len(names.published) >= 3)
        assert names.lookups == 1
        assert names.errors == ["cannot resolve pool: no answer within 0.01 s; its last known addresses stay"]
        hanging.set()
        await until(lambda: names.endpoints == ["10.0.0.99:80"])


async def test_a_new_list_takes_effect_without_waiting_for_the_interval():
    async with Names(ResolutionSettings(interval_s=3600), a=["10.0.0.1"], b=["10.0.0.2"]) as names:
        names.named.set([Member("a:80")])
        await until(lambda: names.published)
        names.named.set([Member("b:80")])
        await until(lambda: names.endpoints == ["10.0.0.2:80"])
        names.named.set([Member("10.0.0.3:80")])
        assert names.endpoints == ["10.0.0.3:80"]
        assert [len(members) for members in names.published] == [1, 1, 1]


def test_kv_endpoints_follow_the_address():
    member = Member("pool:80", kv_events="tcp://*:5557", kv_replay="tcp://:5558")
    assert at_address(member, "fd00::1") == Member(
        "[fd00::1]:80", kv_events="tcp://[fd00::1]:5557", kv_replay="tcp://[fd00::1]:5558"
    )
    elsewhere = Member("pool:80", kv_events="tcp://10.1.1.1:5557")
    assert at_address(elsewhere, "10.0.0.1").kv_events == "tcp://10.1.1.1:5557"
    bound = Member("pool:80", kv_events="tcp://*:5557", kv_bind=True)
    assert at_address(bound, "10.0.0.1").kv_events == "tcp://*:5557"


async def test_the_systems_resolver():
    assert set(await system_resolver("localhost")) <= {"127.0.0.1", "::1"}
    assert await system_resolver("localhost")


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(socket.EAI_NONAME, []), (socket.EAI_AGAIN, socket.gaierror), (socket.EAI_FAIL, OSError)],
)
async def test_only_a_name_that_does_not_exist_is_an_empty_answer(monkeypatch, number, outcome):
    async def getaddrinfo(*_, **__):
        raise socket.gaierror(number, "words")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    if outcome == []:
        assert await system_resolver("nowhere.example") == []
    else:
        with pytest.raises(outcome):
            await system_resolver("nowhere.example")
