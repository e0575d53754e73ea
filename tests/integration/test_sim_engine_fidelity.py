"""The modelled prefix cache against a real vLLM's, request by request and event by event.

The real engine serves a sequence of requests under eviction, one after another. The model then gets the same
prompts with the tokens the real one generated: its `cached_tokens` must be equal every time, and its events
must store and remove the same blocks (named by the hash of all their tokens), in the same order and batches.
"""

import random
from array import array
from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq

from extproc.core.hashing import chain
from extproc.core.namespace import Namespace
from extproc.core.types import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from extproc.sim.engine_model import EngineModel
from extproc.sim.engine_types import EngineConfig, EngineRequest
from tests.support.vllm import Replica, ReplicaSpec, VllmPool

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK_SIZE = 32
BLOCKS = 40
CHUNK = 160
"""Token budget of a step: long prompts take several."""

REQUESTS = 300

Move = tuple[str, int | None]
"""What happened to a block: stored, removed or cleared, and the chain hash of its tokens."""


class Names:
    """Our own name for every block an engine speaks of."""

    def __init__(self) -> None:
        self._ours: dict[int | bytes, int] = {}

    def stored(self, names: Any, parent: Any, tokens: Any, lora: Any, extra_keys: Any) -> list[Move]:
        if parent is None:
            salt = (extra_keys[0] or [None])[-1] if extra_keys else None
            seed = Namespace("", "", lora, salt).seed
        else:
            seed = self._ours[parent]
        ours = chain(array("I", tokens), BLOCK_SIZE, seed)
        self._ours.update(zip(names, ours, strict=True))
        return [("stored", one) for one in ours]

    def removed(self, names: Any) -> list[Move]:
        return [("removed", self._ours[name]) for name in names]


def real_moves(replica: Replica) -> list[list[Move]]:
    """Every batch the replica has published, from its replay socket, decoded without our decoder."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(replica.kv_replay)
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        payloads = []
        while dealer.poll(10_000):
            *_, sequence, payload = dealer.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                break
            payloads.append(payload)
        else:
            raise AssertionError("the replay has no end")
    names = Names()
    batches = []
    for payload in payloads:
        moves: list[Move] = []
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                assert event["block_size"] == BLOCK_SIZE
                moves += names.stored(
                    event["block_hashes"],
                    event["parent_block_hash"],
                    event["token_ids"],
                    event["lora_name"],
                    event["extra_keys"],
                )
            elif event["type"] == "BlockRemoved":
                moves += names.removed(event["block_hashes"])
            else:
                moves.append(("cleared", None))
        batches.append(moves)
    return batches


def model_moves(names: Names, events: tuple[KvEvent, ...]) -> list[Move]:
    moves: list[Move] = []
    for event in events:
        match event:
            case BlockStored():
                moves += names.stored(
                    event.block_hashes, event.parent, event.token_ids, event.lora_name, event.extra_keys
                )
            case BlockRemoved():
                moves += names.removed(event.block_hashes)
            case AllBlocksCleared():
                moves.append(("cleared", None))
    return moves


class Traffic:
    """Growing conversations, exact multiples of a block (which make duplicates), salts and strangers."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._longest = (BLOCKS - 1) * BLOCK_SIZE - 70
        self._chats = [self._tokens(20, 300) for _ in range(5)]

    def _tokens(self, least: int, most: int) -> list[int]:
        return [self._rng.randrange(300, 4000) for _ in range(self._rng.randint(least, most))]

    def next(self) -> tuple[int, list[int], int, str | None]:
        """Number of the conversation, prompt, output length, salt."""
        rng = self._rng
        number = rng.randrange(len(self._chats))
        chat = self._chats[number]
        if len(chat) > self._longest - 200:
            chat = self._chats[number] = self._tokens(20, 300)
        if rng.random() < 0.3:
            prompt = chat[: max(1, len(chat) // BLOCK_SIZE) * BLOCK_SIZE]
        elif rng.random() < 0.15:
            prompt = self._tokens(1, 600)
        else:
            prompt = self._chats[number] = chat + self._tokens(5, 150)
        return number, prompt, rng.randint(1, 60), "s" if rng.random() < 0.1 else None

    def answered(self, number: int, prompt: list[int], output: list[int]) -> None:
        if prompt is self._chats[number]:
            self._chats[number] = prompt + output


def test_the_modelled_cache_is_the_real_one_under_eviction(vllm_pool: VllmPool) -> None:
    (replica,) = vllm_pool.start(
        ReplicaSpec(
            num_gpu_blocks_override=BLOCKS,
            block_size=BLOCK_SIZE,
            extra_args=("--max-num-batched-tokens", str(CHUNK)),
        )
    )
    model = EngineModel(
        EngineConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks=BLOCKS,
            max_model_len=(BLOCKS - 1) * BLOCK_SIZE,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=16,
        )
    )
    names, ours = Names(), []
    cached: list[tuple[int, int]] = []
    traffic = Traffic(seed=11)
    now = 0.0
    for index in range(REQUESTS):
        if index == REQUESTS // 2:
            assert replica.post("/reset_prefix_cache", None) == {"success": model.reset_prefix_cache()}
        number, prompt, length, salt = traffic.next()
        body = {"model": "tiny", "prompt": prompt, "max_tokens": length, "ignore_eos": True}
        body |= {"return_token_ids": True, **({"cache_salt": salt} if salt else {})}
        answer = replica.post("/v1/completions", body)
        output = answer["choices"][0]["token_ids"]
        assert len(output) == length, answer
        traffic.answered(number, prompt, output)

        request = EngineRequest.from_tokens(
            str(index), array("I", prompt), array("I", output), model.config, cache_salt=salt
        )
        model.submit(request, now)
        done = None
        while (deadline := model.next_deadline()) is not None:
            now = deadline
            for result in model.tick(now):
                if result.events:
                    ours.append(model_moves(names, result.events))
                done = next(iter(result.finished), done)
        assert done is not None
        cached.append((done.cached_tokens, answer["usage"]["prompt_tokens_details"]["cached_tokens"]))

    assert [one for one in enumerate(cached) if one[1][0] != one[1][1]] == []
    assert sum(real > 0 for _, real in cached) > 100
    real = real_moves(replica)
    replica.kill()
    assert Counter(move for batch in ours for move in batch) == Counter(
        move for batch in real for move in batch
    )
    kinds = Counter(kind for batch in real for kind, _ in batch)
    assert kinds["removed"] > 500
    assert kinds["cleared"] == 1
    assert ours == real
