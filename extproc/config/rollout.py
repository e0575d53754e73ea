"""How far decisions are acted on, and for which traffic."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from extproc.config.base import PolicyName, Section

ModeName = Literal["observe", "shadow", "enforce"]
Names = Annotated[list[str], Field(min_length=1)]


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
