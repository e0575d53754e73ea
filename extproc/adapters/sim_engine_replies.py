"""The simulated engine's answers in the four shapes its endpoints have, whole and streamed.

Shapes follow vLLM 0.32. Where usage is and what it is called differs: that is the point of having all four.
"""

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FinishReason = Literal["length", "stop"]


@dataclass(slots=True)
class Choice:
    """One generated sequence, as far as it has come."""

    index: int
    prompt: "array[int]"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None


@dataclass(slots=True)
class Answered:
    """One HTTP request being answered. `created` is wall time in seconds."""

    request_id: str
    model: str
    created: int
    choices: Sequence[Choice]
    prompts: Sequence["array[int]"]
    include_usage: bool = False
    return_token_ids: bool = False

    def usage(self) -> dict[str, Any]:
        """Usage over all choices. As in the engine, a batch reports the last prompt's cached tokens."""
        prompt = sum(len(prompt) for prompt in self.prompts)
        completion = sum(len(choice.token_ids) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    @property
    def cached_tokens(self) -> int:
        """Cached tokens of the last prompt."""
        return self.choices[-1].cached_tokens or 0


class Shape(ABC):
    """How one endpoint answers. `news` is what came since the last time: text and ids of one choice."""

    prefix: str
    """What its request ids start with."""
    default_max_tokens: int | None
    """Output limit of a request that sets none; None: as much as fits."""
    limits: tuple[str, ...]
    """Body fields that set the output limit, in order of precedence."""

    @abstractmethod
    def whole(self, answered: Answered) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def opening(self, answered: Answered) -> Iterator[bytes]:
        """What a stream begins with, sent with the first token."""

    @abstractmethod
    def news(self, answered: Answered, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """More of one choice; `choice` already includes it."""

    @abstractmethod
    def closing(self, answered: Answered) -> Iterator[bytes]:
        """What a stream ends with, after every choice has finished."""


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return f"event: {body['type']}\n".encode() + _data(body)


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"
    default_max_tokens = None
    limits = ("max_completion_tokens", "max_tokens")

    def whole(self, answered: Answered) -> dict[str, Any]:
        """One `chat.completion`."""
        return {
            **self._head(answered, "chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "tool_calls": []},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason,
                    "stop_reason": None,
                    "token_ids": choice.token_ids if answered.return_token_ids else None,
                }
                for choice in answered.choices
            ],
            "usage": answered.usage(),
            "prompt_token_ids": list(answered.prompts[0]) if answered.return_token_ids else None,
        }

    def opening(self, answered: Answered) -> Iterator[bytes]:
        """The role of every choice."""
        for choice in answered.choices:
            body = self._head(answered, "chat.completion.chunk")
            delta = {"role": "assistant", "content": ""}
            body["choices"] = [
                {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ]
            if answered.return_token_ids:
                body["prompt_token_ids"] = list(choice.prompt)
            yield _data(body)

    def news(self, answered: Answered, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """A delta."""
        item: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": text},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if answered.return_token_ids:
            item["token_ids"] = list(token_ids)
        return _data({**self._head(answered, "chat.completion.chunk"), "choices": [item]})

    def closing(self, answered: Answered) -> Iterator[bytes]:
        """Usage if it was asked for, and `[DONE]`."""
        if answered.include_usage:
            head = self._head(answered, "chat.completion.chunk")
            yield _data({**head, "choices": [], "usage": answered.usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, answered: Answered, kind: str) -> dict[str, Any]:
        return {
            "id": answered.request_id,
            "object": kind,
            "created": answered.created,
            "model": answered.model,
        }


class CompletionShape(Shape):
    """`/v1/completions`."""

    prefix = "cmpl-"
    default_max_tokens = 16
    limits = ("max_tokens",)

    def whole(self, answered: Answered) -> dict[str, Any]:
        """One `text_completion`."""
        choices = []
        for choice in answered.choices:
            item = self._item(choice, choice.text)
            item["token_ids"] = choice.token_ids if answered.return_token_ids else None
            item["prompt_token_ids"] = list(choice.prompt) if answered.return_token_ids else None
            choices.append(item)
        return {**self._head(answered), "choices": choices, "usage": answered.usage()}

    def opening(self, answered: Answered) -> Iterator[bytes]:
        """Nothing: the first text comes at once."""
        del answered
        return iter(())

    def news(self, answered: Answered, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """A piece of text."""
        item = self._item(choice, text)
        if answered.return_token_ids:
            item["token_ids"] = list(token_ids)
            if len(token_ids) == len(choice.token_ids):
                item["prompt_token_ids"] = list(choice.prompt)
        return _data({**self._head(answered), "choices": [item]})

    def closing(self, answered: Answered) -> Iterator[bytes]:
        """Usage if it was asked for, and `[DONE]`."""
        if answered.include_usage:
            yield _data({**self._head(answered), "choices": [], "usage": answered.usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, answered: Answered) -> dict[str, Any]:
        return {
            "id": answered.request_id,
            "object": "text_completion",
            "created": answered.created,
            "model": answered.model,
        }

    def _item(self, choice: Choice, text: str) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
        }


class ResponsesShape(Shape):
    """`/v1/responses`. It has one choice, and usage is always in its last event."""

    prefix = "resp_"
    default_max_tokens = None
    limits = ("max_output_tokens",)

    def whole(self, answered: Answered) -> dict[str, Any]:
        """One `response`."""
        choice = answered.choices[0]
        cut = choice.finish_reason == "length"
        return {
            "id": answered.request_id,
            "object": "response",
            "created_at": answered.created,
            "model": answered.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message(answered, choice.text, "incomplete" if cut else "completed")],
            "usage": {
                "input_tokens": len(choice.prompt),
                "input_tokens_details": {"cached_tokens": answered.cached_tokens},
                "output_tokens": len(choice.token_ids),
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(choice.prompt) + len(choice.token_ids),
            },
        }

    def opening(self, answered: Answered) -> Iterator[bytes]:
        """The response, its one message and that message's one part."""
        started = {
            "id": answered.request_id,
            "object": "response",
            "created_at": answered.created,
            "model": answered.model,
            "status": "in_progress",
            "output": [],
            "usage": None,
        }
        yield _event({"type": "response.created", "response": started})
        yield _event({"type": "response.in_progress", "response": started})
        message = {**self._message(answered, "", "in_progress"), "content": []}
        yield _event({"type": "response.output_item.added", "output_index": 0, "item": message})
        yield _event({"type": "response.content_part.added", **self._at(answered), "part": self._part("")})

    def news(self, answered: Answered, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """A text delta."""
        del choice, token_ids
        return _event({"type": "response.output_text.delta", **self._at(answered), "delta": text})

    def closing(self, answered: Answered) -> Iterator[bytes]:
        """The finished part, message and response."""
        whole = self.whole(answered)
        text = answered.choices[0].text
        yield _event({"type": "response.output_text.done", **self._at(answered), "text": text})
        yield _event({"type": "response.content_part.done", **self._at(answered), "part": self._part(text)})
        yield _event({"type": "response.output_item.done", "output_index": 0, "item": whole["output"][0]})
        # The engine sends this event for an answer that was cut, too; the status inside tells.
        yield _event({"type": "response.completed", "response": whole})

    def _at(self, answered: Answered) -> dict[str, Any]:
        return {"item_id": f"msg_{answered.request_id}", "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def _message(self, answered: Answered, text: str, status: str) -> dict[str, Any]:
        return {
            "id": f"msg_{answered.request_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part(text)],
        }


class MessagesShape(Shape):
    """Anthropic's `/v1/messages`. `input_tokens` leaves out what was read from the cache."""

    prefix = "chatcmpl-"
    default_max_tokens = None
    limits = ("max_tokens",)

    def whole(self, answered: Answered) -> dict[str, Any]:
        """One `message`."""
        choice = answered.choices[0]
        return {
            **self._head(answered),
            "content": [{"type": "text", "text": choice.text}],
            "stop_reason": self._stop_reason(choice),
            "usage": self._usage(answered),
        }

    def opening(self, answered: Answered) -> Iterator[bytes]:
        """The message, which does not know its usage yet, and its one content block."""
        prompt = len(answered.prompts[0])
        message = {**self._head(answered), "content": [], "stop_reason": None}
        message["usage"] = {"input_tokens": prompt, "output_tokens": 0}
        yield _event({"type": "message_start", "message": message})
        block = {"type": "text", "text": ""}
        yield _event({"type": "content_block_start", "index": 0, "content_block": block})

    def news(self, answered: Answered, choice: Choice, text: str, token_ids: Sequence[int]) -> bytes:
        """A text delta."""
        del answered, choice, token_ids
        delta = {"type": "text_delta", "text": text}
        return _event({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, answered: Answered) -> Iterator[bytes]:
        """Stop reason and usage."""
        yield _event({"type": "content_block_stop", "index": 0})
        delta = {"stop_reason": self._stop_reason(answered.choices[0]), "stop_sequence": None}
        yield _event({"type": "message_delta", "delta": delta, "usage": self._usage(answered)})
        yield _event({"type": "message_stop"})

    def _head(self, answered: Answered) -> dict[str, Any]:
        return {
            "id": answered.request_id,
            "type": "message",
            "role": "assistant",
            "model": answered.model,
            "stop_sequence": None,
        }

    def _stop_reason(self, choice: Choice) -> str:
        return "max_tokens" if choice.finish_reason == "length" else "end_turn"

    def _usage(self, answered: Answered) -> dict[str, Any]:
        cached = answered.cached_tokens
        return {
            "input_tokens": len(answered.prompts[0]) - cached,
            "output_tokens": len(answered.choices[0].token_ids),
            "cache_read_input_tokens": cached,
        }


SHAPES: dict[str, Shape] = {
    "/v1/chat/completions": ChatShape(),
    "/v1/completions": CompletionShape(),
    "/v1/responses": ResponsesShape(),
    "/v1/messages": MessagesShape(),
}
"""Endpoints that generate."""
