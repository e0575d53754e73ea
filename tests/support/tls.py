"""An authority of the test's own, and certificates in files."""

from pathlib import Path

import trustme

from extproc.adapters.server_tls import TlsFiles

NAME = "warmroute.test"


class Authority:
    """`ca_file`, and a certificate for `warmroute.test` in `certificate` and `key`."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.ca_file = folder / "ca.pem"
        self.ca.cert_pem.write_to_path(self.ca_file)
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        self.renew()

    def renew(self, name: str = NAME) -> None:
        """Replace certificate and key, each by renaming."""
        for path, content in zip((self.certificate, self.key), self.issue(name), strict=True):
            temporary = path.with_suffix(".new")
            temporary.write_bytes(content)
            temporary.replace(path)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """(certificate chain, key), as PEM."""
        issued = self.ca.issue_cert(name)
        return b"".join(blob.bytes() for blob in issued.cert_chain_pems), issued.private_key_pem.bytes()

    def files(self, *, ask_clients: bool = False) -> TlsFiles:
        return TlsFiles(self.certificate, self.key, self.ca_file if ask_clients else None)
