"""TLS of our gRPC port: certificate and key from files, read again when they change.

Certificates are renewed while we run (cert-manager, SPIFFE helpers, mounted Secrets): every new connection
gets the one in the files. Files that cannot be used, as in the middle of a renewal, leave the last good one.
"""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from extproc.core.errors import WarmrouteError

_log = logging.getLogger("warmroute.tls")

_Stamp = tuple[tuple[int, int], ...]


class TlsError(WarmrouteError):
    """The files cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients must show a certificate that it has signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def _all(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.certificate, self.key, self.client_ca) if path is not None)

    def stamp(self) -> _Stamp:
        """Changes whenever a file does; links are followed.

        Raises:
            OSError: a file is not there.
        """
        return tuple((found.st_mtime_ns, found.st_ino) for found in (path.stat() for path in self._all))

    def load(self) -> grpc.ServerCertificateConfiguration:
        """What the files hold.

        Raises:
            TlsError: a file cannot be read, holds no PEM, or the key is not the certificate's.
        """
        read = []
        for path in self._all:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise TlsError(f"tls: cannot read {path}: {error.strerror}") from error
            if b"-----BEGIN " not in content:
                raise TlsError(f"tls: {path} is not a PEM file")
            read.append(content)
        self._refuse_misfits()
        certificate, key, *ca = read
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca[0] if ca else None)

    def _refuse_misfits(self) -> None:
        # gRPC would only say that it cannot listen, or go on with what it had without a word to us.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # gRPC has another library: what is too weak, it says
        try:
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise TlsError(f"tls: {self.key} does not fit {self.certificate}: {why}") from error


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files.

    Raises:
        TlsError: the files cannot be used now.
    """
    fetch: Any = follower(files)  # None is for "as before", which the stubs do not know
    return grpc.dynamic_ssl_server_credentials(
        files.load(), fetch, require_client_authentication=files.client_ca is not None
    )


def follower(files: TlsFiles) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Gives the files' content if it has changed since the last call, else None. gRPC's threads call it."""
    seen: _Stamp | None = None

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal seen
        try:
            now = files.stamp()
            if now == seen:
                return None
            loaded = files.load()
        except (OSError, TlsError) as error:
            _log.warning("the last certificate stays: %s", error)
            return None
        seen = now
        return loaded

    return changed
