"""`documents`: many questions on few documents.

Definition. `documents` documents of `document_tokens` tokens each; `questions` questions, each of
`question_tokens` tokens nobody else sends, on a document drawn by Zipf's law (weight `1 / rank^zipf`), each
answered with `answer_tokens`. Every question is a session of its own and `concurrency` of them are under way
at once. What the workload asks: whether a policy keeps a document where it is cached without letting the
popular ones pile up.

Defaults: 24 documents of 12,000 tokens, 600 questions of 60 tokens, answers of 120, zipf 0.8, concurrency 32,
`block_size` 16. There is no trace.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random

from extproc.core.errors import WarmrouteError
from extproc.sim.sessions import Session, Turn, Workload, WorkloadOptions, limited
from extproc.sim.workloads.history import History, key_of
from extproc.sim.workloads.lazily import Lazily


def documents(
    options: WorkloadOptions,
    *,
    documents: int = 24,
    document_tokens: int = 12_000,
    questions: int = 600,
    question_tokens: int = 60,
    answer_tokens: int = 120,
    zipf: float = 0.8,
    concurrency: int = 32,
    block_size: int = 16,
) -> Workload:
    """Many questions on few long documents, some far more popular than others, closed loop.

    See the module's docstring.

    Raises:
        WarmrouteError: a trace is given.
    """
    if options.trace is not None:
        raise WarmrouteError("documents is defined, not recorded: it takes no trace")

    def sessions() -> Iterator[Session]:
        rng = Random(options.seed)  # noqa: S311 - a simulation
        shelf = [History(block_size, key_of("document", options.seed, index)) for index in range(documents)]
        for history in shelf:
            history.extend(0, document_tokens)
        weights = list(accumulate(1 / rank**zipf for rank in range(1, documents + 1)))
        for number in range(questions):
            history = rng.choices(shelf, cum_weights=weights)[0].fork()
            history.extend(key_of("question", number), question_tokens)
            prompt = history.tokens
            history.extend(0, answer_tokens)
            yield Session(id=f"question{number}", turns=(Turn(prompt, answer_tokens, history.blocks),))

    return Workload(
        name="documents",
        block_size=block_size,
        sessions=Lazily(lambda: sessions() if options.limit is None else limited(sessions(), options.limit)),
        concurrency=concurrency,
        rollouts=False,
        description=f"{questions} questions on {documents} documents of {document_tokens} tokens",
    )
