"""From an HTTP body to the sequences the simulated engine runs, or the error vLLM would answer with."""

import itertools
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import xxhash

from extproc.adapters.sim_engine_replies import SHAPES, Shape
from extproc.adapters.sim_engine_text import Answer, Vocabulary
from extproc.core.errors import WarmrouteError
from extproc.prompt.encoder import PromptEncoder
from extproc.prompt.errors import Unsupported
from extproc.protocol.body_limits import BodyLimits
from extproc.protocol.openai import BadRequest, InferenceRequest, LoadOnly, parse_request
from extproc.sim.engine_types import EngineConfig, EngineRequest

Encode = Callable[[InferenceRequest], "Sequence[array[int]]"]
"""Token ids of every prompt of a request. Raises `Unsupported` or `BadRequest`."""

_ENOUGH = 1 << 40
_AS_AN_ENGINE = BodyLimits(read_bytes=_ENOUGH, json_values=_ENOUGH, messages=_ENOUGH, prompts=_ENOUGH)
"""The bounds are the router's: an engine reads whatever reaches it."""


def load_encoder(model_dir: Path) -> Encode:
    """The encoder of the model in `model_dir`.

    Raises:
        WarmrouteError: its tokenizer files are missing or broken; the message names the file.
    """
    encoder = PromptEncoder.load(model_dir, clock=lambda: datetime.now().astimezone())
    return lambda request: encoder.encode(request).prompts


class RefusedError(WarmrouteError):
    """The request is answered with an error of OpenAI's shape."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


@dataclass(frozen=True, slots=True)
class Sequenced:
    """One sequence to run and what it will say."""

    request: EngineRequest
    prompt: "array[int]"
    answer: Answer


@dataclass(frozen=True, slots=True)
class Prepared:
    """One HTTP request, ready to run. `sequences` are ordered by choice index."""

    request_id: str
    shape: Shape
    model: str
    prompts: "Sequence[array[int]]"
    sequences: Sequence[Sequenced]
    stream: bool
    include_usage: bool
    return_token_ids: bool


class RequestReader:
    """Reads bodies for one engine. Its methods block while they encode: call them off the event loop.

    Args:
        config: The engine's limits.
        encode: The model's chat template and tokenizer.
        vocabulary: Where answers come from.
        models: Names the base model is served under, the first of which is the default.
        adapters: Names of LoRA adapters, served as models of their own.
        mean_output_tokens: Mean length of an answer that is not cut by its limit.
        force_include_usage: Stream usage whether or not the client asks for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        encode: Encode,
        vocabulary: Vocabulary,
        *,
        models: Sequence[str],
        adapters: Sequence[str] = (),
        mean_output_tokens: float = 128.0,
        force_include_usage: bool = False,
    ) -> None:
        self._config = config
        self._encode = encode
        self._vocabulary = vocabulary
        self._models = tuple(models)
        self._adapters = frozenset(adapters)
        self._mean_output_tokens = mean_output_tokens
        self._force_include_usage = force_include_usage
        self._count = itertools.count()

    def generation(self, path: str, headers: Mapping[str, str], raw: bytes) -> Prepared:
        """A request to one of the endpoints that generate.

        Raises:
            RefusedError: the engine would answer with an error.
        """
        shape = SHAPES[path]
        parsed = self._parse(path, headers, raw)
        body = parsed.body
        model = self._model(body)
        limit = _limit(body, shape)
        count = _integer(body, "n", 1, default=1)
        request_id = f"{shape.prefix}{next(self._count):x}-{xxhash.xxh3_64_hexdigest(raw)}"
        prompts = self._prompts(parsed)
        sequences: list[Sequenced] = []
        for prompt in prompts:
            for choice in range(count):
                name = f"{request_id}-{len(sequences)}"
                sequences.append(self._sequence(parsed, prompt, name, choice, limit, model))
        options = body.get("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        return Prepared(
            request_id=request_id,
            shape=shape,
            model=model,
            prompts=prompts,
            sequences=sequences,
            stream=parsed.stream,
            include_usage=asked or self._force_include_usage,
            return_token_ids=body.get("return_token_ids") is True,
        )

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        """A request to `/tokenize`: `prompt` or `messages`.

        Raises:
            RefusedError: neither can be read.
        """
        try:
            chat = "messages" in json.loads(raw)
        except (ValueError, TypeError):
            chat = False  # whatever it is, the parser says what is wrong with it
        parsed = self._parse("/v1/chat/completions" if chat else "/v1/completions", {}, raw)
        self._model(parsed.body)
        if not chat and not isinstance(parsed.body.get("prompt"), str):
            raise RefusedError(400, "`prompt` must be a string, or `messages` a list.", param="prompt")
        tokens = list(self._prompts(parsed)[0])
        return {
            "count": len(tokens),
            "max_model_len": self._config.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }

    def _parse(self, path: str, headers: Mapping[str, str], raw: bytes) -> InferenceRequest:
        try:
            parsed = parse_request("POST", path, headers, raw, _AS_AN_ENGINE)
        except BadRequest as error:
            raise RefusedError(400, error.message) from None
        if isinstance(parsed, LoadOnly):
            raise RefusedError(400, f"The request body cannot be read ({parsed.reason}).")
        return parsed

    def _model(self, body: Mapping[str, Any]) -> str:
        model = body.get("model")
        if model is None:
            return self._models[0]
        if model in self._models or model in self._adapters:
            return str(model)
        message = f"The model `{model}` does not exist."
        raise RefusedError(404, message, kind="NotFoundError", param="model")

    def _prompts(self, parsed: InferenceRequest) -> "Sequence[array[int]]":
        try:
            prompts = self._encode(parsed)
        except BadRequest as error:
            raise RefusedError(400, error.message) from None
        except Unsupported as error:
            raise RefusedError(400, f"This simulated engine cannot render the prompt: {error}") from None
        if not prompts or not all(prompts):
            raise RefusedError(400, "The prompt cannot be empty.", param="prompt")
        return prompts

    def _sequence(
        self,
        parsed: InferenceRequest,
        prompt: "array[int]",
        name: str,
        choice: int,
        limit: int | None,
        model: str,
    ) -> Sequenced:
        body = parsed.body
        room = self._config.max_model_len - len(prompt)
        maximum = f"This model's maximum context length is {self._config.max_model_len} tokens."
        if room < 1:
            raise RefusedError(
                400,
                f"{maximum} However, your prompt contains {len(prompt)} input tokens, which leaves no room "
                "for output. Please reduce the length of the input prompt.",
                param="input_tokens",
            )
        if limit is not None and limit > room:
            raise RefusedError(
                400,
                f"{maximum} However, you requested {limit} output tokens and your prompt contains "
                f"{len(prompt)} input tokens. Please reduce one of them.",
                param="max_tokens",
            )
        seed = _integer(body, "seed", None, default=0)
        answer = self._vocabulary.answer(
            xxhash.xxh3_64_intdigest(prompt.tobytes(), seed % 2**64) + choice,
            room if limit is None else limit,
            mean_tokens=self._mean_output_tokens,
            min_tokens=_integer(body, "min_tokens", 0, default=0),
            ignore_eos=body.get("ignore_eos") is True,
        )
        request = EngineRequest.from_tokens(
            name,
            prompt,
            answer.token_ids,
            self._config,
            adapter=model if model in self._adapters else None,
            cache_salt=_salt(body),
            finish_reason="stop" if answer.stopped else "length",
        )
        return Sequenced(request, prompt, answer)


def _limit(body: Mapping[str, Any], shape: Shape) -> int | None:
    for name in shape.limits:
        if body.get(name) is not None:
            return _integer(body, name, 1, default=1)
    return shape.default_max_tokens


def _integer(body: Mapping[str, Any], name: str, least: int | None, *, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        wanted = "an integer" if least is None else f"an integer of at least {least}"
        raise RefusedError(400, f"{name} must be {wanted}, got {value!r}.", param=name)
    return value


def _salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RefusedError(400, "Parameter 'cache_salt' must be a non-empty string if provided.")
    return salt
