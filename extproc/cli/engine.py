"""`warmroute engine`: a simulated vLLM replica in the foreground."""

import argparse
import asyncio
import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from extproc.cli.option_types import checked
from extproc.core.errors import WarmrouteError
from extproc.sim.engine_types import EngineConfig
from extproc.sim.time_model import PRESETS, TimeModel

if TYPE_CHECKING:
    from extproc.adapters.sim_engine_server import SimEngineServer

HELP = "run a simulated vLLM replica: same API, prefix cache, KV events and metrics, no model"

_MAX_MODEL_LEN = 16384
_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--step-ms", "base_ms", "what every step costs at least, in ms"),
    ("--decode-ms-per-seq", "decode_ms_per_sequence", "cost of one more sequence in a decode step, in ms"),
    ("--context-ms-per-token", "context_ms_per_token", "cost of reading one token of KV in a step, in ms"),
    ("--attention-ms-per-pair", "attention_ms_per_pair", "cost of one pair of attending tokens, in ms"),
)
_Number = TypeVar("_Number", int, float)
_port = checked(int, lambda number: 0 <= number < 65536, "a port: use 0 to 65535")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Names and meanings are `vllm serve`'s where it has them."""
    parser.epilog = (
        "Prints one line of JSON when it is ready: host, port, kv_events, kv_replay, model. "
        "Stops on SIGTERM and SIGINT."
    )
    _server_options(parser.add_argument_group("server"))
    _engine_options(parser.add_argument_group("engine"))
    _event_options(parser.add_argument_group("KV events"))
    _time_options(parser.add_argument_group("how long things take"))


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop.

    Raises:
        WarmrouteError: the options contradict each other, the model cannot be read, or a port is taken.
    """
    # Imported here, so that --help is fast.
    from extproc.adapters.sim_engine_requests import load_encoder
    from extproc.adapters.sim_engine_server import SimEngineServer, SimEngineSettings
    from extproc.prompt.tiny import tiny_model_path

    try:
        engine = engine_config(args)
    except ValueError as error:
        raise WarmrouteError(str(error)) from None
    names = tuple(getattr(args, "served_model_name", ("tiny",)))
    adapters = tuple(getattr(args, "lora", ()))
    both = set(names) & set(adapters)
    if both:
        raise WarmrouteError(f"{min(both)!r} is both a model and a LoRA adapter; rename one")
    settings = SimEngineSettings(
        model_dir=getattr(args, "model_dir", None) or tiny_model_path(),
        engine=engine,
        host=args.host,
        port=args.port,
        served_model_names=names,
        adapters=adapters,
        api_keys=tuple(getattr(args, "api_key", ())),
        kv_events=not args.no_kv_events,
        kv_events_port=args.kv_events_port,
        kv_replay_port=args.kv_replay_port,
        kv_events_connect=getattr(args, "kv_events_connect", None),
        kv_topic=getattr(args, "kv_topic", ""),
        force_include_usage=args.force_include_usage,
        mean_output_tokens=args.mean_output_tokens,
    )
    asyncio.run(_serve(SimEngineServer(settings, load_encoder(settings.model_dir))))
    return 0


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's limits and speed from the options.

    Raises:
        ValueError: a value is out of range, or values do not fit together.
    """
    given = {name: getattr(args, name) for _, name, _ in _OPTIONS if hasattr(args, name)}
    if hasattr(args, "prefill_tokens_per_s"):
        given["prefill_ms_per_token"] = 1000.0 / args.prefill_tokens_per_s
    time = dataclasses.replace(PRESETS[args.speed], **given)
    length = getattr(args, "max_model_len", min(_MAX_MODEL_LEN, (args.num_gpu_blocks - 1) * args.block_size))
    return EngineConfig(
        block_size=args.block_size,
        num_gpu_blocks=args.num_gpu_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=length,
        time=time,
        seed=args.seed,
        emit_events=not args.no_kv_events,
    )


async def _serve(server: "SimEngineServer") -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    try:
        ready = {
            "ready": True,
            "host": server.settings.host,
            "port": server.port,
            "kv_events": server.kv_events,
            "kv_replay": server.kv_replay,
            "model": server.settings.served_model_names[0],
        }
        print(json.dumps(ready), flush=True)
        await stop.wait()
    finally:
        await server.close()


def _server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on")
    group.add_argument("--port", type=_port, default=0, metavar="PORT", help="HTTP port; 0 takes a free one")
    group.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="directory of tokenizer and chat template (default: the tiny model that comes with us)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="names of the model (default: tiny)",
    )
    group.add_argument(
        "--lora",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="LoRA adapters, served as models of their own (default: none)",
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="KEY",
        help="answer 401 under /v1 to requests without one of these keys (default: none is asked for)",
    )
    group.add_argument(
        "--force-include-usage", action="store_true", help="end every stream with its usage, asked or not"
    )
    group.add_argument(
        "--mean-output-tokens",
        type=_at_least(float, 1),
        default=128.0,
        metavar="N",
        help="mean length of an answer that max_tokens does not cut",
    )


def _engine_options(group: argparse._ArgumentGroup) -> None:
    whole = _at_least(int, 1)
    group.add_argument("--block-size", type=whole, default=16, metavar="N", help="tokens in one KV block")
    group.add_argument(
        "--num-gpu-blocks",
        type=_at_least(int, 2),
        default=4096,
        metavar="N",
        help="KV blocks; one is kept back",
    )
    group.add_argument(
        "--max-num-seqs", type=whole, default=128, metavar="N", help="sequences running at once"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=whole, default=8192, metavar="N", help="tokens computed in one step"
    )
    group.add_argument(
        "--max-model-len",
        type=whole,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"most tokens of prompt and output (default: {_MAX_MODEL_LEN}, or what the blocks hold)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="goes into the block hashes, so that engines name blocks differently",
    )


def _event_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-kv-events", action="store_true", help="publish no KV events")
    group.add_argument(
        "--kv-events-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port of the events; 0 takes a free one",
    )
    group.add_argument(
        "--kv-replay-port", type=_port, default=0, metavar="PORT", help="port of replays; 0 takes a free one"
    )
    group.add_argument(
        "--kv-events-connect",
        metavar="ENDPOINT",
        default=argparse.SUPPRESS,
        help="connect to this ZMQ endpoint instead of listening, e.g. tcp://127.0.0.1:5557",
    )
    group.add_argument(
        "--kv-topic",
        default=argparse.SUPPRESS,
        metavar="TOPIC",
        help="first frame of every event message (default: empty)",
    )


def _time_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speed",
        choices=sorted(PRESETS),
        default="medium",
        help="set of assumed speeds to start from; the options below override it",
    )
    group.add_argument(
        "--prefill-tokens-per-s",
        type=checked(float, lambda value: value > 0, "a number above 0"),
        metavar="N",
        default=argparse.SUPPRESS,
        help=_with_default("prompt tokens computed per second, beside the cost of the step", None),
    )
    for option, name, text in _OPTIONS:
        group.add_argument(
            option,
            dest=name,
            type=float,
            metavar="MS",
            default=argparse.SUPPRESS,
            help=_with_default(text, getattr(TimeModel(), name)),
        )


def _with_default(text: str, value: float | None) -> str:
    shown = 1000.0 / TimeModel().prefill_ms_per_token if value is None else value
    return f"{text} ({shown:g} with --speed medium)"


def _at_least(kind: Callable[[str], _Number], least: int) -> Callable[[str], _Number]:
    name = "a whole number" if kind is int else "a number"
    return checked(kind, lambda value: value >= least, f"{name} from {least} on")
