from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from extproc.adapters.server_tls import TlsError, follower
from extproc.pb import health_pb2
from tests.support.grpc_host import RecordingRouting, running
from tests.support.tls import NAME, Authority


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


async def alive(address, ca, *, name=NAME, certificate=None, key=None):
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)
    options = [("grpc.ssl_target_name_override", name)]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        call = check(health_pb2.HealthCheckRequest(service="liveness"), timeout=10)
        code = await call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return code is grpc.StatusCode.OK


async def test_clients_that_know_the_authority_are_served_and_plain_text_is_not(authority):
    async with running(RecordingRouting(), tls=authority.files()) as host:
        assert await alive(host.server.address, authority.ca_file)
        with pytest.raises(grpc.aio.AioRpcError):
            await host.check("liveness")


async def test_a_client_certificate_may_be_asked_for(authority, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with running(RecordingRouting(), tls=authority.files(ask_clients=True)) as host:
        assert not await alive(host.server.address, authority.ca_file)
        certificate, key = authority.issue("envoy.test")
        assert await alive(host.server.address, authority.ca_file, certificate=certificate, key=key)
        certificate, key = Authority(elsewhere).issue("envoy.test")
        assert not await alive(host.server.address, authority.ca_file, certificate=certificate, key=key)


async def test_a_renewed_certificate_is_used_for_new_connections(authority):
    async with running(RecordingRouting(), tls=authority.files()) as host:
        assert not await alive(host.server.address, authority.ca_file, name="renewed.test")
        authority.renew("renewed.test")
        assert await alive(host.server.address, authority.ca_file, name="renewed.test")
        # In the middle of the next renewal.
        authority.key.write_text("")
        assert await alive(host.server.address, authority.ca_file, name="renewed.test")


async def test_a_key_of_another_certificate_is_said_so_at_the_start_and_in_a_renewal(authority, caplog):
    old = authority.key.read_bytes()
    changed = follower(authority.files())
    assert changed() is not None
    authority.renew()
    new = authority.key.read_bytes()
    authority.key.write_bytes(old)
    with pytest.raises(TlsError, match="does not fit"):
        async with running(RecordingRouting(), tls=authority.files()):
            pass
    assert changed() is None
    assert "the last certificate stays" in caplog.text
    authority.key.write_bytes(new)
    assert changed() is not None


def test_a_key_that_only_the_systems_openssl_finds_too_weak_is_for_grpc_to_judge(authority):
    # Stands for 2048 bits where the system asks for 3072.
    key = rsa.generate_private_key(65537, 1024)  # noqa: S505
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    now = datetime.now(UTC)
    certificate = x509.CertificateBuilder(
        name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1)
    ).sign(key, hashes.SHA256())
    authority.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    authority.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    assert authority.files().load() is not None


def test_the_follower_tells_of_changes_only(authority, caplog):
    changed = follower(authority.files())
    assert changed() is not None
    assert changed() is None
    authority.renew()
    assert changed() is not None
    authority.key.unlink()
    assert changed() is None
    assert "the last certificate stays" in caplog.text


@pytest.mark.parametrize(("content", "words"), [(None, "cannot read"), ("nonsense", "not a PEM file")])
async def test_files_that_cannot_be_used_are_said_so_at_the_start(authority, content, words):
    if content is None:
        authority.key.unlink()
    else:
        authority.key.write_text(content)
    with pytest.raises(TlsError, match=words):
        async with running(RecordingRouting(), tls=authority.files()):
            pass
