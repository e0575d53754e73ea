"""Half the workers on a new revision with another chat template: every prediction is still the engine's."""

import json
import random
import shutil

import pytest

from extproc.demo.workload import prose
from extproc.prompt.tiny import tiny_model_path
from tests.support.full_stack import FullStack, Worker
from tests.support.sim_engine import SimEngine

pytestmark = pytest.mark.envoy


def new_revision(tmp_path):
    """A model folder whose chat template renders what the old one does not."""
    folder = tmp_path / "model-v2"
    shutil.copytree(tiny_model_path(), folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["chat_template"] = "{{ 'Be brief. ' * 40 }}" + settings["chat_template"]
    config.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("source", ["models", "config"])
async def test_no_request_is_predicted_warm_on_the_wrong_revision(tmp_path, source):
    new = new_revision(tmp_path)
    old = tiny_model_path()
    async with (
        SimEngine(block_size=16) as a,
        SimEngine(block_size=16) as b,
        SimEngine(block_size=16, model_dir=new) as c,
        SimEngine(block_size=16, model_dir=new) as d,
    ):
        engines = {a: old, b: old, c: new, d: new}
        model = {"path": str(old), "names": ["tiny"], "revision": str(old), "revision_from": source}
        model["revisions"] = [{"revision": str(new), "path": str(new)}]
        pool = {"model": model}
        if source == "config":
            described = [
                {
                    "endpoint": e.endpoint,
                    "kv_events": e.kv_events,
                    "kv_replay": e.kv_replay,
                    "revision": str(of),
                }
                for e, of in engines.items()
            ]
            pool["discovery"] = {"static": described}
        workers = [Worker(e.endpoint, e.kv_events, e.kv_replay) for e in engines]
        async with FullStack(tmp_path, workers, pool=pool, settings={"policy": "round-robin"}) as stack:
            await stack.until_subscribed(4)
            if source == "models":
                await stack.until(lambda: stack.router_log().count("serves model revision") >= 4)
            revisions = {engine.endpoint: str(of) for engine, of in engines.items()}
            rng = random.Random(5)
            documents = [prose(rng, 300) for _ in range(4)]
            hits = {str(old): 0, str(new): 0}
            for _ in range(60):
                reply = await stack.chat(
                    [
                        {"role": "user", "content": rng.choice(documents)},
                        {"role": "user", "content": prose(rng, 9)},
                    ]
                )
                entry = await stack.decision(reply.request_id)
                assert entry["model_revision"] == revisions[entry["selected_worker"]]
                assert entry["prompt_tokens"] == reply.usage["prompt_tokens"]
                assert entry["predicted_cached_tokens"] == entry["actual_cached_tokens"], entry
                hits[entry["model_revision"]] += bool(entry["actual_cached_tokens"])
            assert min(hits.values()) > 3
