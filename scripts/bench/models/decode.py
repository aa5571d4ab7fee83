"""Times decoding and prefill of whole models with random weights, for bench_models --decode and
--prefill.

The floor is the least time of a token: reading every weight once except the embedding table, and
reading and writing every state once; with a ring of the last tokens, writing it once in as many
tokens, and reading half a ring. NAME-ring is the preset NAME with rings, NAME-noring without. A
row's `fraction` is the floor over the wall-clock time of `generate`.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.xlstm.modeling_xlstm import xLSTMCache
from transformers.utils import is_xlstm_available

import flashcell
from flashcell import load_kernel
from flashcell.state import replay
from measurement.hardware import BANDWIDTH, RATE
from measurement.record import Row, append, provenance

PROMPT = 16
BATCHES, LENGTHS = (1, 8, 64), (100, 32768, 99900)
PIECE = 4096  # tokens a peer reads at once
WARM = 20  # untimed tokens before the timed ones
PEER_SHARE = 8  # peers, many times slower, are timed over so many times fewer tokens
GRAPH, RING, NO_RING = "-graph", "-ring", "-noring"
FAMILIES = (flashcell.FlashRNNConfig, flashcell.FlashMLSTMConfig, flashcell.FlashXLSTMConfig)
# xLSTM[7:1] with the sizes of its paper's 350M.
SHAPES = {
    "flash_xlstm": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_heads": 4, "slstm_at": [3, 11, 19],
        "vocab_size": 50304,
    }
}  # fmt: skip
# Of 1.41 and 1.45 billion parameters, beside flash_gru_1b's 1.42.
PEERS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 50432, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 18, "num_attention_heads": 16, "max_position_embeddings": 131072,
        "attn_implementation": "sdpa",
    },
    "mamba2": {
        "vocab_size": 50432, "hidden_size": 2048, "num_hidden_layers": 48, "num_heads": 64,
        "head_dim": 64, "n_groups": 1, "state_size": 128, "tie_word_embeddings": False,
    },
    # xLSTM-7B's shape, beside flash_mlstm_7b.
    "xlstm": {"hidden_size": 4096, "num_hidden_layers": 32, "num_heads": 8, "vocab_size": 50304},
}  # fmt: skip
# The published chunk kernel and the fastest of its chunk sizes. Optimising it stops the LLVM of this
# Triton with an assertion; the kernel that it does optimise, limit_chunk, takes as long.
NX_AI_KERNELS = {"chunkwise_kernel": "chunkwise--triton_xl_chunk", "chunk_size": 128}
NX_AI_ENVIRONMENT = {"DISABLE_LLVM_OPT": "1"}
NX_AI = "xlstm-nx-ai"


def make_config(name: str, **changes: Any) -> Any:
    name = name.removesuffix(GRAPH).removesuffix(NO_RING).removesuffix(RING)
    if name in (PEERS | SHAPES):
        return AutoConfig.for_model(name, **((PEERS | SHAPES)[name] | changes))
    if name == NX_AI:
        if not is_xlstm_available():
            raise SystemExit(f"{name} needs the packages xlstm and mlstm_kernels")
        os.environ |= NX_AI_ENVIRONMENT
        return AutoConfig.for_model("xlstm", **PEERS["xlstm"], **NX_AI_KERNELS)
    for family in FAMILIES:
        if name in family.presets:
            return family.preset(name)
    known = [*SHAPES, *PEERS, NX_AI, *(preset for family in FAMILIES for preset in family.presets)]
    raise SystemExit(f"{name} is no preset: {', '.join(known)}")


def make_model(name: str, dtype: torch.dtype, device: str, **changes: Any) -> Any:
    """Makes a model with random weights, drawn on its device: 7 billion take a second."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(name, **changes), dtype=dtype)
    model = model.to_empty(device=device).eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.02)
            else:
                p.fill_(1.0 if "norm" in path else 0.1)
        for module in model.modules():  # fills tables that are no weights, such as rotary angles
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = _again(module, key, buffer)
    model.generation_config.eos_token_id = None
    return model


def _again(module: Any, key: str, buffer: torch.Tensor) -> torch.Tensor:
    kind = type(module)
    if key.endswith("inv_freq"):
        return kind(module.config).get_buffer(key).to(buffer.device)
    raise SystemExit(f"{kind.__name__}.{key} is a buffer, but must be made anew: say how")


def is_ours(model: Any) -> bool:
    return hasattr(model, "decoder")


def dtype_of(model: Any) -> str:
    """Returns the dtype of the linear layers' weights."""
    config = getattr(model.config, "quantization_config", None)
    return str(model.dtype).removeprefix("torch.") if config is None else config.weights


def floor_seconds(model: Any) -> float:
    """Returns the floor of one decoding step at the last batch size; for peers it counts weights
    only."""
    table = model.get_input_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters())
    if model.get_output_embeddings().weight is not table:
        weights -= table.nbytes
    if not is_ours(model):
        return weights / BANDWIDTH
    recording = next(reversed(model.decoder._recordings.values()))
    return (weights + sum(map(moved_bytes, recording.layers))) / BANDWIDTH


def moved_bytes(layer: Any) -> float:
    """Returns the bytes of a recorded layer's states and ring that a token moves, on average."""
    states = sum(s.nbytes for group in layer.states.values() for s in group)
    if layer.replay is None:
        return 2 * states
    ring = layer.replay.ring
    return states * (1 + 1 / ring.k.shape[2]) + (ring.k.nbytes + ring.v.nbytes) / 2


def generate(model: Any, ids: torch.Tensor, tokens: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    torch.cuda.synchronize()
    return time.perf_counter() - start


def replay_seconds(model: Any) -> float:
    """Times the recorded decoding step alone, by replaying it after the last `generate`."""
    graph = next(reversed(model.decoder._recordings.values())).graph
    times = []
    for _ in range(3 * 16):  # whole turns of a ring, so the mean has all its steps
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.mean(times)


def decode_row(name: str, model: Any, batch: int, tokens: int) -> Row:
    ids = torch.randint(1, 1000, (batch, PROMPT), device=model.device)
    if is_ours(model):
        model.decoder.release()  # so that the peak memory is of this batch alone
    else:
        tokens = max(tokens // PEER_SHARE, 1)
    generate(model, ids, 4)
    torch.cuda.reset_peak_memory_stats()
    seconds = generate(model, ids, tokens)
    floor = floor_seconds(model) * tokens
    return {
        "model": name, "what": "decode", "dtype": dtype_of(model),
        "batch": batch, "position": PROMPT, "tokens": tokens,
        "tokens_per_s": batch * tokens / seconds, "ms_token": seconds / tokens * 1e3,
        "ms_step": replay_seconds(model) * 1e3 if is_ours(model) else "",
        "floor_ms": floor / tokens * 1e3,
        "fraction": floor / seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


@torch.no_grad()
def prefill_rows(name: str, model: Any, lengths: list[int], steps: int = 200) -> list[Row]:
    """Times a prompt read into the cache, then `steps` tokens one by one."""
    rows, steps = [], steps if is_ours(model) else max(steps // PEER_SHARE, 1)
    for length in lengths:
        ids = torch.randint(1, 1000, (1, length), device=model.device)
        prefill(model, ids, new_cache(name, model, length))  # compiles kernels for this length
        torch.cuda.reset_peak_memory_stats()
        cache = new_cache(name, model, length + WARM + 2 * steps)
        seconds = prefill(model, ids, cache)
        peak = torch.cuda.max_memory_allocated() / 2**30
        step = step_of(model, cache)
        after = step_seconds(recorded(step) if name.endswith(GRAPH) else step, steps)
        weights = sum(p.numel() for p in model.parameters())
        floor = 2 * weights * length / RATE
        rows.append({
            "model": name, "what": "prefill", "dtype": dtype_of(model),
            "batch": 1, "position": length, "tokens": steps, "tokens_per_s": length / seconds,
            "ms_token": after * 1e3, "ms_step": seconds * 1e3, "floor_ms": floor * 1e3,
            "fraction": floor / seconds, "peak_gib": peak,
        })  # fmt: skip
    return rows


def new_cache(name: str, model: Any, tokens: int) -> Any:
    config = model.config
    if config.model_type == "xlstm":
        return xLSTMCache(config, 1, dtype=model.dtype, device=model.device)
    if config.model_type == "llama" and name.endswith(GRAPH):
        return StaticCache(config=config, max_cache_len=tokens)
    return DynamicCache(config=config)


def call(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    key = "cache_params" if model.config.model_type in ("mamba2", "xlstm") else "past_key_values"
    return model(ids, use_cache=True, logits_to_keep=1, **{key: cache})


def prefill(model: Any, ids: torch.Tensor, cache: Any) -> float:
    # These models cut a long prompt themselves.
    whole = is_ours(model) or model.config.model_type == "xlstm"
    torch.cuda.synchronize()
    start = time.perf_counter()
    for piece in [ids] if whole else ids.split(PIECE, 1):
        call(model, piece, cache)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def step_of(model: Any, cache: Any) -> Callable[[], Any]:
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    return lambda: call(model, token, cache)


def recorded(step: Callable[[], Any]) -> Callable[[], Any]:
    """Records a peer's step as a CUDA graph, to time it without launches; transformers has none."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def step_seconds(step: Callable[[], Any], steps: int) -> float:
    times = []
    for _ in range(WARM + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:])


def show(rows: list[Row], say: Callable[[str], Any] = print) -> None:
    for row in rows:
        text = f"{row['model']} {row['what']} B{row['batch']} at {row['position']}: "
        if row["what"] == "decode":
            text += f"{row['tokens_per_s']:.0f} tokens/s, {row['ms_token']:.3f} ms a token"
            step = f"step {row['ms_step']:.3f}, " if row["ms_step"] else ""
            text += f" ({step}floor {row['floor_ms']:.3f})"
        else:
            text += f"{row['ms_step']:.1f} ms, then {row['ms_token']:.3f} ms a token"
        say(f"{text}, {row['fraction']:.0%} of the floor, peak {row['peak_gib']:.1f} GiB")


def add_arguments(parser: Any) -> None:
    """Adds the arguments of --decode and --prefill to the parser."""
    add = parser.add_argument_group("decode and prefill").add_argument
    add("--batch", type=int, action="extend", nargs="+", help=f"of --decode; default: {BATCHES}")
    add("--lengths", type=int, action="extend", nargs="+", help=f"of --prefill; default: {LENGTHS}")
    add("--kernel", default="tfla", help="whose build the rows name")


def run(arguments: Any) -> None:
    shipped, rings = replay.ROWS, {"ring": {"cuda": 1}, "noring": {}}  # rows by device
    for name in arguments.decode or arguments.prefill:
        replay.ROWS = rings.get(name.rpartition("-")[2], shipped)
        model = make_model(name, torch.bfloat16, "cuda")
        if arguments.weights:
            flashcell.quantize_weights(model, flashcell.QuantizationConfig(arguments.weights))
        if arguments.decode:
            batches = arguments.batch or BATCHES
            rows = [decode_row(name, model, batch, arguments.tokens) for batch in batches]
        else:
            rows = prefill_rows(name, model, arguments.lengths or LENGTHS)
        show(rows)
        if arguments.append:
            kernel = load_kernel(arguments.kernel, "cuda", arguments.backend)
            stamp = provenance("cuda", kernel, arguments.commit)
            append([row | stamp for row in rows], arguments.results, "decode")
        del model
        gc.collect()  # recording and model refer to each other
        torch.cuda.empty_cache()
