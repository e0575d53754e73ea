"""An engine's Prometheus page to `EngineMetrics`, one per data-parallel rank.

The library parses; before it does, lines of families nobody asks for are dropped by name, because a page
has 600 lines of which 25 matter. Rules:

- a family that is missing, or a value that is NaN, infinite or impossible, is None, never 0;
- the newer name of a family wins over the older;
- several series of one rank are added (shares: the highest counts);
- of the reasons for waiting only `deferred` is read: those wait for a grammar or for KV from elsewhere;
- of the states of sleep only `awake` is read;
- vLLM writes the blocks of all ranks of a page together into the information of each: they are shared out;
- no `engine` label means rank 0; information without that label holds for every rank of the page;
- of `lora_requests_info` only the newest series counts: its value is when it was last true, old series stay.
  Who is active is not known where it has no `engine` label and the page has several ranks (each rank writes
  the same series), nor where several processes of a server write it (their times are added up, so what is
  newest cannot be told). Its `max_lora` holds for every rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import nlargest

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from extproc.core.errors import ProtocolError
from extproc.core.types import EngineMetrics, HistogramTotals

RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CACHE_QUERIES = (
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_queries",
)
CACHE_HITS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_hits",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits",
)
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
PROMPT_TOKENS = ("vllm:prompt_tokens_total",)
GENERATION_TOKENS = ("vllm:generation_tokens_total",)
CACHE_INFO = "vllm:cache_config_info"
LORA_INFO = "vllm:lora_requests_info"
SLEEP_STATE = "vllm:engine_sleep_state"

TTFT = ("vllm:time_to_first_token_seconds",)
QUEUE_TIME = ("vllm:request_queue_time_seconds",)
PREFILL_TIME = ("vllm:request_prefill_time_seconds",)
INTER_TOKEN = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")

_HISTOGRAMS = (*TTFT, *QUEUE_TIME, *PREFILL_TIME, *INTER_TOKEN)

SAMPLE_NAMES: tuple[str, ...] = (
    *RUNNING,
    *WAITING,
    WAITING_BY_REASON,
    *KV_USAGE,
    *CACHE_QUERIES,
    *CACHE_HITS,
    *PREEMPTIONS,
    *PROMPT_TOKENS,
    *GENERATION_TOKENS,
    CACHE_INFO,
    LORA_INFO,
    SLEEP_STATE,
    *(f"{name}{part}" for name in _HISTOGRAMS for part in ("_sum", "_count")),
)
"""Every sample that is read: what a filtered scrape asks for."""

_WANTED = frozenset(SAMPLE_NAMES)
_SERIES = 1 << 14  # whose names and labels are remembered: some twenty a rank
_SHOWN = 120  # characters of a bad line that an error quotes
_LONGEST_LINE = 32 << 10
_REMEMBERED_LINE = 1 << 10
_MOST_LABELS = 200
_MOST_LINES = 1 << 13
_MOST_ADAPTER_LINES = 512
_LATEST_TIME = 3e9  # seconds since 1970: the year 2065. Two times of today add up to more


@dataclass(slots=True)
class _Rank:
    """Samples of one rank: name to the values of its series."""

    values: dict[str, list[float]] = field(default_factory=dict)
    model_name: str | None = None


@dataclass(slots=True)
class _Page:
    ranks: dict[int, _Rank] = field(default_factory=dict)
    # Rank (None: the page's) to labels of the info series, and the newest lora series with its value.
    cache_info: dict[int | None, Mapping[str, str]] = field(default_factory=dict)
    lora: dict[int | None, tuple[float, Mapping[str, str]]] = field(default_factory=dict)


def parse_engine_metrics(page: str | bytes) -> dict[int, EngineMetrics]:
    """Metrics by data-parallel rank. A page without any family of an engine gives an empty dict.

    Raises:
        ProtocolError: not the text exposition format, cut off, or a wanted line is malformed.
    """
    text = _decode(page)
    seen = _Page()
    found = False
    for name, labels, value in _samples(_wanted_lines(text)):
        found = True
        _add(seen, name, labels, value)
    if not found:
        _require_exposition_format(text)
    # Information alone (an engine that has not counted anything yet) still names its rank.
    for rank in (*seen.cache_info, *seen.lora):
        if rank is not None:
            seen.ranks.setdefault(rank, _Rank())
    if found and not seen.ranks:
        seen.ranks[0] = _Rank()
    return {rank: _metrics(seen, rank) for rank in sorted(seen.ranks)}


def has_unwanted_samples(page: str) -> bool:
    """Whether a page holds more than the samples of `SAMPLE_NAMES` (a server that ignored the filter)."""
    return any(
        line.strip() and line[0] != "#" and _sample_name(line) not in _WANTED for line in page.split("\n")
    )


def _decode(page: str | bytes) -> str:
    if isinstance(page, bytes):
        try:
            page = page.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"metrics page is not UTF-8 text: {error.reason}") from error
    # The format ends every line with a line feed, so a missing one means a value may be cut in half.
    if page and not page.endswith("\n"):
        raise ProtocolError(f"metrics page is cut off: it ends with {page[-_SHOWN:].splitlines()[-1]!r}")
    return page


def _wanted_lines(text: str) -> Iterator[str]:
    """Lines with the samples that are read, as many as an engine with a hundred ranks has.

    Raises:
        ProtocolError: there are more, or one has more labels or is longer: parsing would take too long.
    """
    others: list[str] = []
    count = 0
    for line in text.split("\n"):
        if not line.startswith("vllm:") or (name := _sample_name(line)) not in _WANTED:
            continue
        if len(line) > _LONGEST_LINE or line.count('="') > _MOST_LABELS:
            raise ProtocolError(f"a line of the metrics page is too long: {line[:_SHOWN]!r}")
        if name == LORA_INFO:
            others.append(line)  # the series of adapters that were loaded once stay on the page
            continue
        count += 1
        if count > _MOST_LINES:
            raise ProtocolError(f"more than {_MOST_LINES} samples of engines on a metrics page")
        yield line
    if len(others) > _MOST_ADAPTER_LINES:
        others = nlargest(_MOST_ADAPTER_LINES, others, key=_value_of)
    yield from others


def _value_of(line: str) -> float:
    try:
        return float(line.rpartition(" ")[2])
    except ValueError:
        return math.inf  # so that it is looked at, and complained of


def _sample_name(line: str) -> str:
    return line.partition("{")[0].split(maxsplit=1)[0]


def _samples(lines: Iterable[str]) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for line in lines:
        try:
            series, _, value = line.rpartition(" ")
            if series.endswith("}") or " " not in series:
                # The same series come with every scrape; only their values change.
                look_up = _series if len(series) < _REMEMBERED_LINE else _series.__wrapped__
                yield *look_up(series), float(value)
            else:
                for sample in _parsed(line):
                    yield sample.name, sample.labels, float(sample.value)
        except (ValueError, IndexError) as error:
            raise ProtocolError(f"malformed line in metrics page: {line[:_SHOWN]!r}") from error


@lru_cache(maxsize=_SERIES)
def _series(text: str) -> tuple[str, Mapping[str, str]]:
    """Name and labels of a line without its value."""
    (sample,) = _parsed(f"{text} 0")
    return sample.name, sample.labels


def _parsed(line: str) -> Iterator[Sample]:
    # One line at a time, so that an error can name it.
    for family in text_string_to_metric_families(line):
        yield from family.samples


def _require_exposition_format(text: str) -> None:
    for line in text.split("\n"):
        if not line or line.isspace() or line.startswith("#"):
            continue
        for _ in _samples([line]):
            return


def _add(page: _Page, name: str, labels: Mapping[str, str], value: float) -> None:
    rank = _rank(labels)
    if name == CACHE_INFO:
        page.cache_info.setdefault(rank, labels)
        return
    if name == LORA_INFO:
        newest = page.lora.get(rank)
        if math.isfinite(value) and (newest is None or value > newest[0]):
            page.lora[rank] = (value, labels)
        return
    if name == WAITING_BY_REASON and labels.get("reason") != "deferred":
        return
    if name == SLEEP_STATE and labels.get("sleep_state") != "awake":
        return
    state = page.ranks.setdefault(rank or 0, _Rank())
    state.values.setdefault(name, []).append(value)
    state.model_name = state.model_name or labels.get("model_name")


def _rank(labels: Mapping[str, str]) -> int | None:
    text = labels.get("engine")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ProtocolError(f"metrics page has engine={text!r}: expected the number of a data-parallel rank")
    return int(text)


def _metrics(page: _Page, rank: int) -> EngineMetrics:
    state = page.ranks[rank]
    values = state.values
    info = page.cache_info.get(rank, page.cache_info.get(None, {}))
    at, lora = page.lora.get(rank, page.lora.get(None, (0.0, {})))
    merged = at > _LATEST_TIME or (rank not in page.lora and len(page.ranks) > 1)
    usage = _value(values, KV_USAGE, max)
    awake = _value(values, (SLEEP_STATE,), min)
    return EngineMetrics(
        running=_whole(_value(values, RUNNING)),
        waiting=_whole(_value(values, WAITING)),
        deferred=_whole(_value(values, (WAITING_BY_REASON,))),
        kv_usage=None if usage is None or usage > 1.0 else usage,
        block_size=_positive(info.get("block_size")),
        num_gpu_blocks=_blocks(page, info),
        prefix_cache_queries=_value(values, CACHE_QUERIES),
        prefix_cache_hits=_value(values, CACHE_HITS),
        preemptions=_value(values, PREEMPTIONS),
        prompt_tokens=_value(values, PROMPT_TOKENS),
        generation_tokens=_value(values, GENERATION_TOKENS),
        ttft=_totals(values, TTFT),
        queue_time=_totals(values, QUEUE_TIME),
        prefill_time=_totals(values, PREFILL_TIME),
        inter_token=_totals(values, INTER_TOKEN),
        model_name=state.model_name,
        adapters=() if merged else _adapters(lora),
        max_adapters=_positive(lora.get("max_lora")),
        awake=None if awake is None else awake > 0.0,
    )


def _blocks(page: _Page, info: Mapping[str, str]) -> int | None:
    """KV blocks of one rank."""
    total = _positive(info.get("num_gpu_blocks"))
    told = [one.get("num_gpu_blocks") for rank, one in page.cache_info.items() if rank is not None]
    if total is None or len(told) < 2 or len(set(told)) > 1:
        return total
    return total // len(told) or None


def _value(
    values: Mapping[str, list[float]],
    names: Iterable[str],
    combine: Callable[[list[float]], float] = math.fsum,
) -> float | None:
    """The first name on the page, over its series; None when a series makes no sense."""
    for name in names:
        series = values.get(name)
        if series is not None:
            return combine(series) if all(math.isfinite(one) and one >= 0 for one in series) else None
    return None


def _totals(values: Mapping[str, list[float]], names: Iterable[str]) -> HistogramTotals | None:
    for name in names:
        total, count = _value(values, (f"{name}_sum",)), _value(values, (f"{name}_count",))
        if total is not None and count is not None:
            return HistogramTotals(total, count)
    return None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _positive(text: str | None) -> int | None:
    """A positive whole number; anything else ("None" before the engine knows it) is unknown."""
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return int(text) or None


def _adapters(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Adapters with requests running or waiting, sorted."""
    names = (
        name.strip()
        for key in ("running_lora_adapters", "waiting_lora_adapters")
        for name in labels.get(key, "").split(",")
    )
    return tuple(sorted({name for name in names if name}))
