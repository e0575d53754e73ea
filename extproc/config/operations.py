"""What an operator looks at: the admin server and the journal."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from extproc.config.base import ConfigError, Section


class Admin(Section):
    """Health, metrics, decisions and the status page over HTTP."""

    listen: str = Field("127.0.0.1:9902", description="`host:port`; empty: off")
    token_file: Path | None = Field(
        None, description="file with the bearer token that everything but `/livez` and `/readyz` asks for"
    )

    def token(self) -> str | None:
        """The token; None when none is asked for.

        Raises:
            ConfigError: the file cannot be read, or holds none.
        """
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
