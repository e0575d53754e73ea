from pathlib import Path

from loadtests.live.peers import REQUIREMENTS, RUST_ROUTERS, find, why_absent


def test_command_lines_name_every_worker_and_only_loopback():
    for router in RUST_ROUTERS:
        line = router.command(Path("/v/bin/x"), 1234, 5678, ["127.0.0.1:1", "127.0.0.1:2"], "cache_aware")
        text = " ".join(line)
        assert "--worker-urls http://127.0.0.1:1 http://127.0.0.1:2 --policy cache_aware" in text
        assert "--host 127.0.0.1 --port 1234" in text
        assert "--prometheus-host 127.0.0.1 --prometheus-port 5678" in text
    assert RUST_ROUTERS[1].command(Path("/s"), 1, 2, [], "p")[1] == "launch"


def test_absent_routers_say_how_to_get_them(tmp_path):
    router = RUST_ROUTERS[0]
    assert find(router, None) is None
    assert find(router, str(tmp_path)) is None
    for where in (None, str(tmp_path)):
        reason = why_absent(router, where)
        assert all(requirement in reason for requirement in REQUIREMENTS)
    program = tmp_path / "bin" / router.program
    program.parent.mkdir()
    program.touch(mode=0o755)
    assert find(router, str(tmp_path)) == program


def test_every_router_is_pinned():
    assert {router.program for router in RUST_ROUTERS} == {one.split("==")[0] for one in REQUIREMENTS}
