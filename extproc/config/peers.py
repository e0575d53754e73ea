"""Other Warmroute replicas in front of the same fleet."""

import socket
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from extproc.adapters.peer_security import PeerSecurity, PeerTls
from extproc.config.addresses import EndpointAddress, HostName, ListenAddressOrOff
from extproc.config.base import ConfigError, Seconds, Section


class PeersDns(Section):
    """A name that resolves to all replicas, such as that of a headless Service."""

    name: HostName = Field(description="DNS name")
    port: Annotated[int, Field(gt=0, lt=65536)] = Field(description="of their `peers.listen`")
    interval_s: Seconds = Field(5.0, description="seconds between lookups")


class PeersTls(Section):
    """Mutual TLS between replicas. Without it, plain text."""

    certificate: Path = Field(description="PEM file with our certificate, for serving and for calling")
    key: Path = Field(description="PEM file with its key")
    ca: Path = Field(description="PEM file with the authority of all replicas")
    name: str | None = Field(None, description="DNS name in their certificates; null: as they are dialled")


class IndexSnapshot(Section):
    """What is known of the engines' caches, on disk: for a single replica that restarts."""

    path: Path | None = Field(None, description="the file; null: off")
    interval_s: Seconds = Field(30.0, description="written so often, and when we stop")
    max_age_s: Seconds = Field(3600.0, description="an older one is not used")


class Peers(Section):
    """Exchange of load with other replicas in front of the same fleet."""

    listen: ListenAddressOrOff = Field(
        "", description="`host:port` where other replicas reach us; process n of `processes` has port + n"
    )
    name: str | None = Field(None, description="ours; null: host name and `listen`. No two may have the same")
    static: list[EndpointAddress] = Field(default_factory=list, description="`host:port` of other replicas")
    dns: PeersDns | None = None
    token_file: Path | None = Field(None, description="file with a secret that all replicas share")
    tls: PeersTls | None = None
    interval_s: Seconds = Field(0.05, description="what has changed is told so often")
    fade_after_s: Seconds = Field(2.0, description="silence after which a replica counts for less and less")
    gone_after_s: Seconds = Field(6.0, description="silence after which it counts for nothing")
    warm_start: bool = Field(default=True, description="begin with what a peer knows of the engines' caches")
    snapshot: IndexSnapshot = Field(default_factory=IndexSnapshot)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.fade_after_s >= self.gone_after_s:
            raise ValueError("`fade_after_s` must be less than `gone_after_s`")
        if (self.static or self.dns is not None) and not self.listen:
            raise ValueError("`static` and `dns` find replicas that must reach us too: set `listen`")
        return self

    @property
    def several(self) -> bool:
        """Whether there may be replicas besides the processes of one `serve`."""
        return bool(self.listen)

    def name_of(self, listen: str, process: int) -> str:
        """What a process is called: the same after every restart, and nowhere else."""
        base = self.name or f"{socket.gethostname()}:{listen.rpartition(':')[2]}"
        return f"{base}/{process}"

    def security(self) -> PeerSecurity:
        """The adapters' form of it.

        Raises:
            ConfigError: the token cannot be read.
        """
        tls = self.tls
        return PeerSecurity(
            self._token(),
            None if tls is None else PeerTls(tls.certificate, tls.key, tls.ca, tls.name),
        )

    def _token(self) -> str | None:
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"peers.token_file: cannot read {self.token_file}: {error}") from error
        if not token:
            raise ConfigError(f"peers.token_file: {self.token_file} is empty; put a long random text there")
        return token
