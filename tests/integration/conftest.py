"""Fixtures of the tests that run other programs. Each skips, with the reason, where the program is absent."""

from collections.abc import Iterator

import pytest

from tests.support.vllm import Replica, ReplicaSpec, VllmPool, VllmUnavailableError, vllm_python

REPLICAS = 3


@pytest.fixture(scope="session")
def vllm_pool() -> Iterator[VllmPool]:
    """Starts real vLLM replicas; everything it started ends with the session."""
    try:
        python = vllm_python()
    except VllmUnavailableError as error:
        pytest.skip(str(error))
    with VllmPool(python) as pool:
        yield pool


@pytest.fixture(scope="session")
def vllm_replicas(vllm_pool: VllmPool) -> list[Replica]:
    """Three real replicas of the tiny model, block size 32. Shared: their caches may hold earlier prompts."""
    return vllm_pool.start(*[ReplicaSpec()] * REPLICAS)
