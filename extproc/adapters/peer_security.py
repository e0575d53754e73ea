"""Who may speak to whom among replicas: TLS in both directions, and a token all of them share."""

import hmac
from dataclasses import dataclass
from pathlib import Path

import grpc

from extproc.adapters.server_tls import TlsError, TlsFiles, server_credentials

_HEADER = "authorization"


@dataclass(frozen=True, slots=True)
class PeerTls:
    """PEM files. Each side shows `certificate` and accepts what `ca` has signed, for `name`."""

    certificate: Path
    key: Path
    ca: Path
    name: str | None = None


@dataclass(frozen=True, slots=True)
class PeerSecurity:
    """How connections between replicas are secured; by default not at all."""

    token: str | None = None
    tls: PeerTls | None = None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a caller shows."""
        return () if self.token is None else ((_HEADER, f"Bearer {self.token}"),)

    def admits(self, metadata: "grpc.aio.Metadata | tuple[tuple[str, str | bytes], ...] | None") -> bool:
        """Whether a caller that showed this may speak to us."""
        if self.token is None:
            return True
        shown = next((value for key, value in metadata or () if key == _HEADER), "")
        given = shown if isinstance(shown, bytes) else shown.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(given, f"Bearer {self.token}".encode())

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Listen on `address`; the port.

        Raises:
            TlsError: the files cannot be used.
            RuntimeError: the address cannot be had.
        """
        if self.tls is None or address.startswith("unix:"):
            return server.add_insecure_port(address)
        files = TlsFiles(self.tls.certificate, self.tls.key, self.tls.ca)
        return server.add_secure_port(address, server_credentials(files))

    def channel(self, address: str, options: list[tuple[str, int | str]]) -> grpc.aio.Channel:
        """A channel to a peer; connections within one host's private folder (`unix:`) are never encrypted.

        Raises:
            TlsError: the files cannot be used.
        """
        if self.tls is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, options=options)
        read = []
        for path in (self.tls.ca, self.tls.key, self.tls.certificate):
            try:
                read.append(path.read_bytes())
            except OSError as error:
                raise TlsError(f"peers.tls: cannot read {path}: {error.strerror}") from error
        if self.tls.name is not None:
            options = [*options, ("grpc.ssl_target_name_override", self.tls.name)]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*read), options=options)
