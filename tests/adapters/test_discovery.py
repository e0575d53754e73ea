import json
import os
import threading
from contextlib import asynccontextmanager

import pytest

from extproc.adapters.discovery import Discovery, DnsDiscovery, FileDiscovery, StaticDiscovery
from extproc.adapters.envoy_bootstrap import write_workers_file
from extproc.adapters.name_resolution import ResolutionSettings
from extproc.core.types import Member
from extproc.protocol.addresses import AddressError
from extproc.protocol.members_file import parse_members
from tests.support.waiting import until

TEMPLATE = Member("", pool="chat")
QUICK = ResolutionSettings(interval_s=0.005)


class Seen:
    def __init__(self):
        self.members, self.errors = [], []

    @property
    def endpoints(self):
        return [member.endpoint for member in self.members[-1]] if self.members else None


@asynccontextmanager
async def discovering(*sources):
    seen = Seen()
    async with Discovery(sources, on_members=seen.members.append, on_error=seen.errors.append):
        yield seen


def watching(path, **more):
    return FileDiscovery(path, TEMPLATE, interval_s=0.01, **more)


def replace(path, text):
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_a_static_list_is_there_at_once():
    members = [Member("10.0.0.1:80", dp_size=2), Member("10.0.0.2:80")]
    async with discovering(StaticDiscovery(members)) as seen:
        assert seen.members == [tuple(members)]


def test_a_static_address_that_is_none_is_refused_at_once():
    with pytest.raises(AddressError, match="nonsense"):
        StaticDiscovery([Member("nonsense")])


async def test_static_names_and_dns_names_are_resolved():
    async def resolve(name):
        return {"one": ["10.0.0.1"], "many": ["10.0.0.3", "10.0.0.2"]}[name]

    sources = [
        StaticDiscovery([Member("one:80")], QUICK, resolve),
        DnsDiscovery("many", 81, Member("", pool="chat", kv_events="tcp://*:5557"), QUICK, resolve),
    ]
    async with discovering(*sources) as seen:
        await until(lambda: seen.endpoints and len(seen.endpoints) == 3)
        assert seen.endpoints == ["10.0.0.1:80", "10.0.0.2:81", "10.0.0.3:81"]
        assert seen.members[-1][1] == Member("10.0.0.2:81", pool="chat", kv_events="tcp://10.0.0.2:5557")


async def test_members_of_a_name_have_the_ranks_of_the_template():
    async def resolve(name):
        return ["10.0.0.1"]

    template = Member("", dp_size=2, dp_start_rank=2)
    async with discovering(DnsDiscovery("many", 81, template, QUICK, resolve)) as seen:
        await until(lambda: seen.members)
        assert seen.members == [(Member("10.0.0.1:81", dp_size=2, dp_start_rank=2),)]


async def test_nothing_is_told_while_nothing_changes():
    lookups = 0

    async def resolve(name):
        nonlocal lookups
        lookups += 1
        return ["10.0.0.1"]

    async with discovering(DnsDiscovery("pool", 80, TEMPLATE, QUICK, resolve)) as seen:
        await until(lambda: lookups > 5)
        assert len(seen.members) == 1


async def test_sources_are_merged_and_the_first_describes_an_endpoint(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80, 10.0.0.2:80]")
    static = StaticDiscovery([Member("10.0.0.2:80", pool="static")])
    async with discovering(static, watching(path)) as seen:
        assert seen.members[-1] == (Member("10.0.0.2:80", pool="static"), Member("10.0.0.1:80", pool="chat"))
        replace(path, "[10.0.0.3:80]")
        await until(lambda: seen.endpoints == ["10.0.0.2:80", "10.0.0.3:80"])


async def test_a_file_replaced_by_rename_is_noticed(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    async with discovering(watching(path)) as seen:
        assert seen.endpoints == ["10.0.0.1:80"]
        replace(path, "[10.0.0.2:80]")
        await until(lambda: seen.endpoints == ["10.0.0.2:80"])


async def test_a_file_rewritten_in_place_with_the_same_size_and_time_is_noticed(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    stat = path.stat()
    async with discovering(watching(path)) as seen:
        path.write_text("[10.0.0.2:80]")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        await until(lambda: seen.endpoints == ["10.0.0.2:80"])


async def test_a_symbolic_link_that_moves_is_noticed(tmp_path):
    (tmp_path / "a").write_text("[10.0.0.1:80]")
    (tmp_path / "b").write_text("[10.0.0.2:80]")
    link, new = tmp_path / "workers.yaml", tmp_path / "new"
    link.symlink_to("a")
    async with discovering(watching(link)) as seen:
        new.symlink_to("b")
        new.replace(link)
        await until(lambda: seen.endpoints == ["10.0.0.2:80"])


@pytest.mark.parametrize("text", ["", "- [", "{hosts: 1}", "[10.0.0.1]", "\x00"])
async def test_a_broken_file_keeps_the_old_list_and_is_reported_once_until_it_is_whole(tmp_path, text):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    async with discovering(watching(path)) as seen:
        for failures in (1, 2):
            replace(path, text)
            await until(lambda failures=failures: len(seen.errors) == failures)
            assert str(path) in seen.errors[-1]
            assert "the last good list stays" in seen.errors[-1]
            replace(path, f"[10.0.0.1:80, 10.0.0.{failures + 1}:80]")
            await until(lambda failures=failures: seen.endpoints[-1] == f"10.0.0.{failures + 1}:80")
        assert len(seen.members) == 3


async def test_a_file_that_goes_back_to_what_it_was_can_break_anew(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    source = watching(path)
    async with discovering(source) as seen:
        replace(path, "- [")
        await until(lambda: len(seen.errors) == 1)
        replace(path, "[10.0.0.1:80]")
        await until(lambda: source._error is None)
        replace(path, "- [")
        await until(lambda: len(seen.errors) == 2)
        assert len(seen.members) == 1


async def test_a_file_may_go_and_come(tmp_path):
    path = tmp_path / "workers.yaml"
    async with discovering(watching(path)) as seen:
        assert seen.members == []
        assert "No such file" in seen.errors[0]
        path.write_text("[10.0.0.1:80]")
        await until(lambda: seen.endpoints == ["10.0.0.1:80"])
        path.unlink()
        await until(lambda: len(seen.errors) == 2)
        assert seen.endpoints == ["10.0.0.1:80"]
        path.write_text("[10.0.0.2:80]")
        await until(lambda: seen.endpoints == ["10.0.0.2:80"])


async def test_an_empty_list_is_believed(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    async with discovering(watching(path)) as seen:
        replace(path, "[]")
        await until(lambda: seen.endpoints == [])
        assert not seen.errors


async def test_a_file_being_written_is_not_read_half(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("")
    source = watching(path)
    pieces = ["- 10.0.0.1:80\n", "- 10.0.0.2:80\n", "- 10.0.0.3:80\n"]
    real_read, reads = source._read, 0

    def read():
        # The writer is always a line ahead of the reader.
        nonlocal reads
        if 0 < reads <= len(pieces):
            with path.open("a") as file:
                file.write(pieces[reads - 1])
        reads += 1
        return real_read()

    source._read = read
    async with discovering(source) as seen:
        await until(lambda: seen.members)
        assert seen.members == [tuple(Member(f"10.0.0.{n}:80", pool="chat") for n in (1, 2, 3))]


@pytest.mark.parametrize("text", ["- 10.0.0.1:80\n", "- 10.0.0.1\n"], ids=["good", "broken"])
async def test_a_file_is_parsed_beside_the_event_loop_and_once(tmp_path, monkeypatch, text):
    parsed_by = []

    def parsing(*arguments):
        parsed_by.append(threading.current_thread())
        return parse_members(*arguments)

    monkeypatch.setattr("extproc.adapters.discovery.parse_members", parsing)
    path = tmp_path / "workers.yaml"
    path.write_text(text)
    source = watching(path)
    real_read, reads = source._read, 0

    def read():
        nonlocal reads
        reads += 1
        return real_read()

    source._read = read
    async with discovering(source):
        await until(lambda: reads > 6)
    assert len(parsed_by) == 1
    assert threading.main_thread() not in parsed_by


async def test_a_huge_file_is_an_error_not_a_burden(tmp_path, monkeypatch):
    monkeypatch.setattr("extproc.adapters.discovery.MAX_FILE_BYTES", 100)
    path = tmp_path / "workers.yaml"
    path.write_text("#" * 101)
    async with discovering(watching(path)) as seen:
        assert "larger than 100 bytes" in seen.errors[0]


async def test_a_file_that_was_too_large_and_is_as_before_may_become_so_again(tmp_path, monkeypatch):
    monkeypatch.setattr("extproc.adapters.discovery.MAX_FILE_BYTES", 100)
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    source = watching(path)
    async with discovering(source) as seen:
        for failures in (1, 2):
            replace(path, "#" * 101)
            await until(lambda failures=failures: len(seen.errors) == failures)
            replace(path, "[10.0.0.1:80]")
            await until(lambda: source._error is None)
        assert len(seen.members) == 1


async def test_one_file_serves_envoy_and_us(tmp_path):
    path = tmp_path / "workers.yaml"
    write_workers_file(path, ["10.0.0.1:80"])
    async with discovering(watching(path, cluster="workers")) as seen:
        assert seen.members == [(Member("10.0.0.1:80", pool="chat"),)]
        write_workers_file(path, ["10.0.0.1:80", "10.0.0.2:80"])
        await until(lambda: seen.endpoints == ["10.0.0.1:80", "10.0.0.2:80"])


async def test_names_in_a_file_are_resolved(tmp_path):
    async def resolve(name):
        return ["10.0.0.7"]

    path = tmp_path / "workers.json"
    path.write_text(json.dumps(["worker:80"]))
    async with discovering(watching(path, settings=QUICK, resolve=resolve)) as seen:
        await until(lambda: seen.endpoints == ["10.0.0.7:80"])


async def test_nothing_is_told_after_the_end(tmp_path):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    async with discovering(watching(path)) as seen:
        pass
    replace(path, "[10.0.0.2:80]")
    async with discovering(watching(path)) as later:
        assert later.endpoints == ["10.0.0.2:80"]
    assert len(seen.members) == 1


async def test_a_callback_that_raises_does_not_stop_discovery(tmp_path, caplog):
    path = tmp_path / "workers.yaml"
    path.write_text("[10.0.0.1:80]")
    calls = []

    def on_members(members):
        calls.append(members)
        raise RuntimeError("a bug elsewhere")

    async with Discovery([watching(path)], on_members=on_members, on_error=calls.append) as discovery:
        replace(path, "[10.0.0.2:80]")
        await until(lambda: len(calls) == 2)
        assert discovery.members == calls[-1]
    assert "a bug elsewhere" in caplog.text


async def test_it_is_complete_when_every_source_has_published(tmp_path):
    path = tmp_path / "members"
    discovery = Discovery(
        [StaticDiscovery([Member("10.0.0.1:80")]), watching(path)],
        on_members=lambda _: None,
        on_error=lambda _: None,
    )
    async with discovery:
        assert discovery.members == (Member("10.0.0.1:80"),)
        assert not discovery.complete
        path.write_text("[]")
        await until(lambda: discovery.complete)
