"""What all sections of the configuration are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from extproc.core.errors import WarmrouteError

Seconds = Annotated[float, Field(gt=0)]


class ConfigError(WarmrouteError):
    """The configuration cannot be used; the message says where and why."""


class Section(BaseModel):
    """A mapping in the file. Unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
