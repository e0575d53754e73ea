"""What the demo asks: many questions on a few long documents, and chats of several turns.

Pure: the same seed gives the same texts. Documents are long against what one replica can cache, so where
a question goes decides whether its document must be prefilled again.
"""

from dataclasses import dataclass, field
from random import Random

_WORDS = """
the of and to in a is that for it as was with be by on not he this are or his from at which but have
an had they you were their one all we can her has there been if more when will would who so no out up
into time people year work state water place report engine market valve pressure contract section
party river system model table record value method result city energy process field light number
cause effect history nature order paper question answer machine signal station bridge winter summer
measure surface material control network journal volume account detail future region council
""".split()  # noqa: SIM905 - a list literal would be eight times as long


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One user: a system prompt and the questions asked in order. Each answer stays in the history."""

    name: str
    system: str
    questions: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Size of the workload. `document_words` is roughly 1.3 times as many tokens."""

    documents: int = 8
    questions: int = 24
    document_words: int = 2200
    chats: int = 6
    turns: int = 5
    chat_words: int = 150
    max_tokens: int = 24
    seed: int = 7


@dataclass(frozen=True, slots=True)
class Workload:
    """Dialogues in the order in which they start."""

    dialogues: tuple[Dialogue, ...]
    requests: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", sum(len(d.questions) for d in self.dialogues))


def prose(rng: Random, words: int) -> str:
    """`words` words in sentences and paragraphs."""
    out: list[str] = []
    while words > 0:
        length = min(words, rng.randint(6, 16))
        sentence = " ".join(rng.choices(_WORDS, k=length))
        out.append(sentence[0].upper() + sentence[1:] + ("." if rng.random() < 0.85 else ".\n"))
        words -= length
    return " ".join(out)


def build(settings: WorkloadSettings) -> Workload:
    """The workload for these settings."""
    rng = Random(settings.seed)  # noqa: S311 - a reproducible workload, not a secret
    dialogues: list[Dialogue] = []
    for document in range(settings.documents):
        text = prose(rng, settings.document_words)
        dialogues += [
            Dialogue(
                name=f"document {document} question {question}",
                system=f"Answer from this document.\n\n{text}",
                questions=(f"{prose(rng, 12)} Is that so?",),
                max_tokens=settings.max_tokens,
            )
            for question in range(settings.questions)
        ]
    for chat in range(settings.chats):
        turns = tuple(prose(rng, settings.chat_words) for _ in range(settings.turns))
        dialogues.append(Dialogue(f"chat {chat}", "You are a helpful assistant.", turns, settings.max_tokens))
    rng.shuffle(dialogues)
    return Workload(tuple(dialogues))
