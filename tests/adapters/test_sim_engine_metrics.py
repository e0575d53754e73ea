import gzip
from array import array
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from extproc.adapters.sim_engine_metrics import EngineMetricsPage
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig, EngineRequest

REAL = Path(__file__).parent.parent / "data" / "vllm" / "metrics_0.32.txt.gz"


def families(text: str) -> dict[str, tuple[str, str, frozenset[frozenset[str]]]]:
    """Name -> type, help text up to its first sentence, and the label names its samples carry."""
    return {
        family.name: (
            family.type,
            family.documentation.partition(". ")[0].partition(": ")[0].rstrip("."),
            frozenset(frozenset(sample.labels) for sample in family.samples),
        )
        for family in text_string_to_metric_families(text)
    }


def test_every_family_is_one_of_the_real_engine_with_its_type_text_and_labels() -> None:
    real = families(gzip.decompress(REAL.read_bytes()).decode())
    ours = families(EngineMetricsPage(EngineModel(EngineConfig()), "tiny", max_loras=0).render().decode())
    config = ours.pop("vllm:cache_config_info")
    real_config = real.pop("vllm:cache_config_info")
    assert config[:2] == real_config[:2]
    assert next(iter(config[2])) <= next(iter(real_config[2]))
    assert len(ours) > 25
    for name, family in ours.items():
        assert family == real[name], name


def test_histogram_bounds_are_the_real_ones() -> None:
    def bounds(text: str) -> dict[str, list[str]]:
        out: dict[str, list[str]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    out.setdefault(family.name, []).append(sample.labels["le"])
        return out

    real = bounds(gzip.decompress(REAL.read_bytes()).decode())
    ours = bounds(EngineMetricsPage(EngineModel(EngineConfig()), "tiny", max_loras=0).render().decode())
    assert ours
    for name, bound in ours.items():
        assert bound == real[name], name


def test_adapters_are_named_while_they_run_and_old_series_stay() -> None:
    model = EngineModel(EngineConfig())
    page = EngineMetricsPage(model, "tiny", max_loras=2)
    request = EngineRequest.from_tokens(
        "a", array("I", range(5)), array("I", [1, 2]), model.config, adapter="sql"
    )
    model.submit(request, 0.0)
    assert 'running_lora_adapters="",waiting_lora_adapters="sql"' in page.render().decode()
    model.tick(0.0)
    assert 'running_lora_adapters="sql",waiting_lora_adapters=""' in page.render().decode()
    assert 'waiting_lora_adapters="sql"' in page.render().decode()
