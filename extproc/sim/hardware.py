r"""Engines by model and GPU: what a step costs there, and how much KV memory there is.

Derivation (the usual roofline argument; nothing here was measured by us):

    base_ms                = weight bytes / (bandwidth * MBU) + 1 ms         a step reads every weight once
    prefill_ms_per_token   = 2 * parameters / (peak FLOP/s * MFU)            2 FLOP per parameter and token
    attention_ms_per_pair  = 4 * layers * attention width / (peak * MFU)     QK^T and PV, 2 FLOP each
    decode_ms_per_sequence = prefill_ms_per_token + 0.01 ms                  its token's FLOPs, its sampling
    context_ms_per_token   = KV bytes per token / (bandwidth * MBU)          a decode step reads its context
    KV tokens              = (0.9 * memory - weight bytes - 2 GB) / KV bytes per token

all divided by (GPUs * 0.85) where a model is split over several, except the 1 ms and the 0.01 ms.

Published figures: peak dense BF16 and memory bandwidth from NVIDIA's data sheets (A100 80 GB SXM: 312
TFLOP/s, 2,039 GB/s; H100 SXM: 989 TFLOP/s, 3,350 GB/s; L4: 121 TFLOP/s, 300 GB/s); parameters, layers and
heads from the models' `config.json` (Llama 3.1 8B and 70B, Qwen3 32B). 0.9 is vLLM's default
`gpu_memory_utilization`.

Assumed: MFU (share of the peak FLOP/s) 0.5. MBU (share of the bandwidth) 0.77, after one published
measurement: Llama 3.1 8B in vLLM on an A100 40 GB decodes 75 tokens/s for one request, 77 % of the bandwidth
(johnmusgrave.com, "vLLM throughput-latency sweep on NVIDIA A100"); the formula gives 14.4 ms per token there,
the measurement 13.3. Assumed too: 1 ms per step for scheduler and launches, 2 GB for activations, and 0.85 as
the efficiency of tensor parallelism.
"""

from dataclasses import dataclass

from extproc.sim.engine_types import EngineConfig
from extproc.sim.time_model import PRESETS, TimeModel

_MFU, _MBU, _SPLIT = 0.5, 0.77, 0.85
_OVERHEAD_MS, _SAMPLING_MS = 1.0, 0.01
_ACTIVATIONS_GB, _UTILIZATION = 2.0, 0.9
_BYTES = 2  # per BF16 number


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published peaks: dense BF16 TFLOP/s, memory bandwidth in GB/s, memory in GB."""

    tflops: float
    gb_per_s: float
    memory_gb: float


@dataclass(frozen=True, slots=True)
class Model:
    """Published shape. `attention_width` = attention heads * head size; likewise `kv_width`."""

    parameters: float
    layers: int
    attention_width: int
    kv_width: int


@dataclass(frozen=True, slots=True)
class EnginePreset:
    """One replica.

    Attributes:
        time: what steps cost.
        kv_tokens: tokens of KV cache it has memory for.
        max_model_len: longest sequence.
        source: where the figures come from.
    """

    time: TimeModel
    kv_tokens: int
    max_model_len: int
    source: str

    def engine(self, block_size: int, *, max_num_seqs: int = 256, max_batched: int = 8192) -> EngineConfig:
        """Limits of an engine with blocks of `block_size` tokens."""
        blocks = self.kv_tokens // block_size + 1
        return EngineConfig(
            block_size=block_size,
            num_gpu_blocks=blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched,
            max_model_len=min(self.max_model_len, (blocks - 1) * block_size),
            time=self.time,
        )


A100 = Gpu(312.0, 2039.0, 80.0)
H100 = Gpu(989.0, 3350.0, 80.0)
L4 = Gpu(121.0, 300.0, 24.0)
LLAMA_8B = Model(8.03e9, 32, 4096, 1024)
LLAMA_70B = Model(70.6e9, 80, 8192, 1024)
QWEN3_32B = Model(32.8e9, 64, 8192, 1024)


def roofline(model: Model, gpu: Gpu, gpus: int = 1, max_model_len: int = 131_072) -> EnginePreset:
    """The derivation in the module's docstring."""
    scale = gpus * _SPLIT if gpus > 1 else 1.0
    flops_per_ms = gpu.tflops * 1e9 * _MFU * scale
    bytes_per_ms = gpu.gb_per_s * 1e6 * _MBU * scale
    weights = model.parameters * _BYTES
    kv_bytes = 2 * model.layers * model.kv_width * _BYTES
    per_token = 2 * model.parameters / flops_per_ms
    time = TimeModel(
        base_ms=weights / bytes_per_ms + _OVERHEAD_MS,
        prefill_ms_per_token=per_token,
        attention_ms_per_pair=4 * model.layers * model.attention_width / flops_per_ms,
        decode_ms_per_sequence=per_token + _SAMPLING_MS,
        context_ms_per_token=kv_bytes / bytes_per_ms,
    )
    free = (gpu.memory_gb * _UTILIZATION - _ACTIVATIONS_GB) * 1e9 * gpus - weights
    return EnginePreset(time, int(free / kv_bytes), max_model_len, "derived from published peaks")


_ASSUMED = "assumed, not modelled on a machine"

ENGINE_PRESETS: dict[str, EnginePreset] = {
    "llama-8b-a100": roofline(LLAMA_8B, A100),
    "llama-8b-h100": roofline(LLAMA_8B, H100),
    "llama-8b-l4": roofline(LLAMA_8B, L4),
    "qwen3-32b-2xh100": roofline(QWEN3_32B, H100, 2),
    "llama-70b-4xh100": roofline(LLAMA_70B, H100, 4),
    **{
        name: EnginePreset(time, tokens, 131_072, _ASSUMED)
        for name, time, tokens in (
            ("demo", PRESETS["demo"], 65_536),
            ("medium", PRESETS["medium"], 400_000),
            ("large", PRESETS["large"], 400_000),
            ("instant", PRESETS["instant"], 400_000),
        )
    },
}
"""By name: `model-gpu` (derived from public figures) and the assumed sets of `time_model`."""
