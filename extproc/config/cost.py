"""Coefficients of the cost model, as the file names them."""

from typing import Annotated

from pydantic import Field

from extproc.config.base import Section
from extproc.core.cost import CostSettings

_COST = CostSettings()


class Cost(Section):
    """Coefficients of the cost model; see `extproc/core/cost.py` for the formula."""

    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = Field(
        _COST.prefill_tokens_per_s, description="prefill rate of a worker until it is learned"
    )
    overhead_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.overhead_ms,
        description="time to first token of an empty prompt on an idle worker until learned",
    )
    attention_ms_per_mpair: Annotated[float, Field(ge=0)] = Field(
        _COST.attention_ms_per_mpair,
        description="ms per million (token, earlier token) pairs of a prefill until learned",
    )
    reload_tokens_per_s: Annotated[float, Field(gt=0)] = Field(
        _COST.reload_tokens_per_s, description="rate at which offloaded KV comes back to the GPU"
    )
    step_ms_per_sequence: Annotated[float, Field(ge=0)] = Field(
        _COST.step_ms_per_sequence, description="what one more sequence adds to a decode step"
    )
    step_ms_per_1k_context: Annotated[float, Field(ge=0)] = Field(
        _COST.step_ms_per_1k_context, description="what 1,000 more tokens of context add to a decode step"
    )
    decode_weight: Annotated[float, Field(ge=0)] = Field(
        _COST.decode_weight,
        description="what a ms of slower decoding weighs beside one of a later first token",
    )
    interference: Annotated[float, Field(ge=0)] = Field(
        _COST.interference,
        description="ms others lose on a crowded worker per ms of prefill that another worker would not do",
    )
    idle_interference: Annotated[float, Field(ge=0)] = Field(
        _COST.idle_interference,
        description="the same on a worker idle for the moment, at most, by how busy it has been",
    )
    expected_output_tokens: Annotated[float, Field(gt=0)] = Field(
        _COST.expected_output_tokens, description="generated tokens per request until learned"
    )
    cold_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        _COST.cold_share,
        description="share of each worker's time kept for cold requests; 0: none",
    )
    max_cold_slowdown: Annotated[float, Field(ge=1)] = Field(
        _COST.max_cold_slowdown,
        description="within its share a cold request waits at most this many times as long as it must",
    )
    max_prefix_share: Annotated[float, Field(gt=0, le=1)] = Field(
        _COST.max_prefix_share, description="share of a worker's time that one prefix may take; 1: no bound"
    )
    eviction: Annotated[float, Field(ge=0)] = Field(
        _COST.eviction, description="how much of the expected loss by eviction is charged to who evicts"
    )
    adapter_load_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.adapter_load_ms, description="time to bring an adapter to the GPU of a worker that lacks it"
    )
    tie_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.tie_ms, description="costs closer than this (or than 2 %) are equal"
    )
    max_extra_ttft_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.max_extra_ttft_ms,
        description="a warm worker may be this much worse in predicted TTFT than the best cold one",
    )
    max_warm_wait_ms: Annotated[float, Field(ge=0)] = Field(
        _COST.max_warm_wait_ms, description="with a longer queue, warmth does not count against a faster one"
    )
    long_output_tokens: Annotated[float, Field(gt=0)] = Field(
        _COST.long_output_tokens, description="generations expected to be this long have bounds of their own"
    )
    long_max_extra_ttft_ms: Annotated[float, Field(ge=0)] | None = Field(
        _COST.long_max_extra_ttft_ms, description="`max_extra_ttft_ms` of long generations; null: the same"
    )
    long_max_warm_wait_ms: Annotated[float, Field(ge=0)] | None = Field(
        _COST.long_max_warm_wait_ms, description="`max_warm_wait_ms` of long generations; null: the same"
    )

    def settings(self) -> CostSettings:
        """The core's form of it."""
        return CostSettings(**self.model_dump())
