"""What a vLLM engine counts about itself, under the meanings its metrics have (0.32)."""

from extproc.sim.histogram import Histogram

_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


class EngineStats:
    """Counters and histograms since the engine started. Tokens, seconds.

    A lookup is counted when the request is admitted; lookups of preempted requests are not counted.
    Queue, prefill, decode and end-to-end times are observed when a request finishes, time to first token
    when that token comes.
    """

    __slots__ = (
        "computed_tokens",
        "decode",
        "e2e",
        "finished",
        "generation_tokens",
        "inference",
        "inter_token",
        "preemptions",
        "prefill",
        "prefill_computed",
        "prefix_hits",
        "prefix_queries",
        "prompt_tokens",
        "queue",
        "request_generation",
        "request_preemptions",
        "request_prompt",
        "step_tokens",
        "time_per_output_token",
        "ttft",
    )

    def __init__(self) -> None:
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self.ttft = Histogram(_TTFT_S)
        self.inter_token = Histogram(_TOKEN_S)
        self.time_per_output_token = Histogram(_TOKEN_S)
        self.queue = Histogram(_REQUEST_S)
        self.prefill = Histogram(_REQUEST_S)
        self.decode = Histogram(_REQUEST_S)
        self.inference = Histogram(_REQUEST_S)
        self.e2e = Histogram(_REQUEST_S)
        self.request_prompt = Histogram(_TOKENS)
        self.request_generation = Histogram(_TOKENS)
        self.prefill_computed = Histogram(_TOKENS)
        self.request_preemptions = Histogram(_PREEMPTIONS)
        self.step_tokens = Histogram(_STEP_TOKENS)

    def first_token(self, prompt_tokens: int, cached_tokens: int, ttft_s: float) -> None:
        """A prompt has been computed."""
        self.prompt_tokens += prompt_tokens
        self.computed_tokens += prompt_tokens - cached_tokens
        self.ttft.observe(ttft_s)

    def request_finished(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        preemptions: int,
        queue_s: float,
        prefill_s: float,
        decode_s: float,
    ) -> None:
        """A request has produced its last token."""
        self.finished[reason] += 1
        self.queue.observe(queue_s)
        self.prefill.observe(prefill_s)
        self.decode.observe(decode_s)
        self.inference.observe(prefill_s + decode_s)
        self.e2e.observe(queue_s + prefill_s + decode_s)
        if output_tokens > 1:
            self.time_per_output_token.observe(decode_s / (output_tokens - 1))
        self.request_prompt.observe(prompt_tokens)
        self.request_generation.observe(output_tokens)
        self.prefill_computed.observe(prompt_tokens - cached_tokens)
        self.request_preemptions.observe(preemptions)
