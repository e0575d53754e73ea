"""How far decisions are acted on, and for which traffic."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.base import PolicyName, Section
from extproc.core import rollout as core
from extproc.core.rollout import Mode

ModeName = Literal["observe", "shadow", "enforce"]
Names = Annotated[list[str], Field(min_length=1)]


def _set(names: list[str] | None) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


class TrafficClass(Section):
    """Requests that everything named here matches; of them, a percentage."""

    name: Annotated[str, Field(min_length=1)] = Field(description="what the decision log calls it")
    mode: ModeName = Field("enforce", description="as `rollout.mode`, for this class")
    percent: Annotated[float, Field(ge=0, le=100)] = Field(
        100.0, description="of its sessions (of its requests, where they have none); the rest goes on down"
    )
    header: str | None = Field(None, description="request header that must be there")
    values: Names | None = Field(None, description="values the header may have; null: any")
    tenants: Names | None = Field(None, description="null: any")
    pools: Names | None = Field(None, description="null: any")
    models: Names | None = Field(None, description="model names, as clients write them; null: any")

    @model_validator(mode="after")
    def _values_of_a_header(self) -> Self:
        if self.values is not None and self.header is None:
            raise ValueError("`values` are those of a `header`: name it")
        return self

    def settings(self) -> core.TrafficClass:
        """The core's form of it."""
        return core.TrafficClass(
            name=self.name,
            mode=Mode(self.mode),
            percent=self.percent,
            header=None if self.header is None else self.header.lower(),
            values=_set(self.values),
            tenants=_set(self.tenants),
            pools=_set(self.pools),
            models=_set(self.models),
        )


class Rollout(Section):
    """How far decisions are acted on: the way from first proof to full use."""

    mode: ModeName = Field(
        "enforce",
        description="observe: Envoy balances, we only log; shadow: `baseline` decides, the policy is logged; "
        "enforce: the policy decides",
    )
    baseline: PolicyName = Field("least-load", description="what decides in mode shadow")
    classes: list[TrafficClass] = Field(
        default_factory=list, description="the first one that takes a request sets its mode"
    )

    def settings(self) -> core.Rollout:
        """The core's form of it."""
        return core.Rollout(Mode(self.mode), tuple(one.settings() for one in self.classes))
