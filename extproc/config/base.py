"""What all sections of the configuration are made of."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from extproc.adapters.policy_plugins import available_policies
from extproc.core.errors import WarmrouteError

Seconds = Annotated[float, Field(gt=0)]


def _known_policy(name: str) -> str:
    known = available_policies()
    if name not in known:
        raise ValueError(f"there is no policy {name!r}; choose from {', '.join(known)}")
    return name


PolicyName = Annotated[str, AfterValidator(_known_policy)]


class ConfigError(WarmrouteError):
    """The configuration cannot be used; the message says where and why."""


class Section(BaseModel):
    """A mapping in the file. Unknown settings are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
