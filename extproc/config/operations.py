"""What an operator looks at: the admin server and the journal."""

import os
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from extproc.config.addresses import ListenAddressOrOff
from extproc.config.base import ConfigError, Section


class Admin(Section):
    """Health, metrics, decisions and the status page over HTTP."""

    listen: ListenAddressOrOff = Field("127.0.0.1:9902", description="`host:port`; empty: off")
    token_file: Path | None = Field(
        None, description="file with the bearer token that everything but `/livez` and `/readyz` asks for"
    )
    token_env: str | None = Field(None, description="environment variable that holds it, instead")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.token_file is not None and self.token_env is not None:
            raise ValueError("name one of `token_file` and `token_env`")
        return self

    def token(self) -> str | None:
        """The token; None when none is asked for.

        Raises:
            ConfigError: it is not where it should be.
        """
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise ConfigError(f"admin.token_env: the environment variable {self.token_env} is not set")
            return token
        if self.token_file is None:
            return None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"admin.token_file: cannot read {self.token_file}: {error}") from error
        if not token:
            raise ConfigError(f"admin.token_file: {self.token_file} is empty; put a long random text there")
        return token


class Journal(Section):
    """A record of all the router is told, without prompts, for `warmroute replay`."""

    path: Path | None = Field(None, description="the file; null: off")
    max_mb: Annotated[float, Field(gt=0)] = Field(256.0, description="where a journal ends")
    keep: Annotated[int, Field(ge=1)] = Field(2, description="journals of earlier starts that remain")
