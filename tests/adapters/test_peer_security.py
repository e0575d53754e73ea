import grpc
import pytest

from extproc.adapters.peer_security import PeerSecurity, PeerTls
from extproc.adapters.server_tls import TlsError
from tests.support.tls import NAME, Authority

ECHO = "warmroute.test.Echo"


async def answer(server_side, client_side, address="127.0.0.1:0"):
    """What a caller gets from a server of one method."""

    async def echo(request, _context):
        return request

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(ECHO, {"Say": grpc.unary_unary_rpc_method_handler(echo)})
    server.add_generic_rpc_handlers((handler,))
    port = server_side.listen(server, address)
    await server.start()
    try:
        where = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        async with client_side.channel(where, []) as channel:
            return await channel.unary_unary(f"/{ECHO}/Say")(b"hello", timeout=20)
    finally:
        await server.stop(0)


def tls(authority, ca=None):
    return PeerSecurity(tls=PeerTls(authority.certificate, authority.key, (ca or authority).ca_file, NAME))


async def test_replicas_of_one_authority_speak_to_each_other(tmp_path):
    authority = Authority(tmp_path)
    assert await answer(tls(authority), tls(authority)) == b"hello"


@pytest.mark.parametrize("stranger", ["server", "client"])
async def test_a_stranger_is_refused_by_either_side(tmp_path, stranger):
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    sides = (tls(theirs), tls(ours)) if stranger == "server" else (tls(ours), tls(theirs, ca=ours))
    with pytest.raises(grpc.aio.AioRpcError):
        await answer(*sides)


async def test_sockets_in_a_private_folder_need_no_certificate(tmp_path):
    authority = Authority(tmp_path)
    assert await answer(tls(authority), tls(authority), f"unix:{tmp_path}/socket") == b"hello"


def test_files_that_are_missing_are_named(tmp_path):
    authority = Authority(tmp_path)
    authority.key.unlink()
    with pytest.raises(TlsError, match=r"peers.tls: cannot read .*key.pem"):
        tls(authority).channel("127.0.0.1:1", [])


def test_the_token_admits_and_nothing_else_does():
    security = PeerSecurity("secret")
    assert security.admits(security.metadata())
    for shown in (None, (), (("authorization", "Bearer secre"),), (("authorization", b"Bearer \xff"),)):
        assert not security.admits(shown)
    assert PeerSecurity().admits(())
    assert PeerSecurity().metadata() == ()
