"""How long one engine step takes.

    step_ms = base_ms
            + prefill_ms_per_token   * prompt tokens computed in this step
            + attention_ms_per_pair  * (token, earlier token) pairs among those prompt tokens
            + decode_ms_per_sequence * sequences that produce their next token in this step
            + context_ms_per_token   * tokens of KV cache those sequences read

`base_ms` is what a step costs however little it does: launching kernels, reading the weights, the
scheduler. The pair term is the growth of attention in long prompts: a chunk of n tokens that starts at
position p adds `n * p + n * (n - 1) / 2` pairs. The last two terms are why a full batch decodes slower.

The presets are assumptions of a plausible shape, not measurements of any machine. Set the coefficients
yourself to model a particular one.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Coefficients of the formula above, in milliseconds.

    Raises:
        ValueError: a coefficient is negative or not finite, or a step would take no time at all.
    """

    base_ms: float = 6.0
    prefill_ms_per_token: float = 0.1
    attention_ms_per_pair: float = 2.5e-6
    decode_ms_per_sequence: float = 0.05
    context_ms_per_token: float = 2e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} is {value}; it must be a finite number of ms, 0 or more")
        if self.base_ms <= 0:
            raise ValueError("base_ms must be above 0: a step that takes no time never lets time pass")

    def step_s(self, prefill_tokens: int, prefill_pairs: float, decodes: int, context_tokens: int) -> float:
        """Duration of a step in seconds."""
        return (
            self.base_ms
            + self.prefill_ms_per_token * prefill_tokens
            + self.attention_ms_per_pair * prefill_pairs
            + self.decode_ms_per_sequence * decodes
            + self.context_ms_per_token * context_tokens
        ) / 1000.0


PRESETS: dict[str, TimeModel] = {
    # Quick enough for a demonstration, slow enough that a cold document is felt.
    "demo": TimeModel(4.0, 0.12, 2.5e-6, 0.1, 2e-5),
    # A model of several billion parameters on one accelerator.
    "medium": TimeModel(),
    # Ten times that.
    "large": TimeModel(30.0, 0.9, 1.2e-5, 0.2, 1e-4),
    # Almost free: for tests of everything around the engine.
    "instant": TimeModel(0.05, 0.0005, 0.0, 0.0, 0.0),
}
"""Named coefficient sets (assumed, see the module's docstring)."""
