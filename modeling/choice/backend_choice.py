"""Decides whether a module with backend="auto" runs torch.nn's own forward or our kernels.

The decision follows from the call's sizes and a table of measured costs (cost_tables.py).

torch.nn's forward runs only where it keeps all that our modules promise. Our kernels always run:
under autocast, torch.func's transforms, forward-mode derivatives, torch.compile, torch.export and
torch.jit.trace; for inputs of a tensor subclass without a __torch_function__ of its own (overrides.py),
parametrized or replaced weights and states of another dtype; on a GPU also in a CUDA graph, under
torch.use_deterministic_algorithms (cuDNN's gradients may differ between runs), where
FLASHCELL_CUDA_ENGINE is set, and for weights that cuDNN would copy.
"""

import os
import threading
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from ..hub.kernel_loader import kernel_info, load_kernel
from ..kernels.fused_rnn.padding import padded_width
from ..kernels.fused_rnn.private_names import (
    forward_level,
    is_tracing,
    product_precision,
    recurrent_precision,
    transforms_are_active,
    weight_of,
    weights_are_flat,
)
from . import cost_tables
from .cost_model import (
    CELLS,
    PRECISIONS,
    Call,
    Device,
    Prediction,
    nearest,
    predict,
)
from .overrides import overrides_torch, states_override_torch

MOST_CALLS = 4096  # decisions that are kept
CODES = {
    torch.bfloat16: PRECISIONS.index("bf16"),
    torch.float16: PRECISIONS.index("fp16"),
    torch.float32: PRECISIONS.index("fp32"),
}
TF32 = PRECISIONS.index("tf32")
ENGINE_CELLS = ("lstm", "gru", "rnn_tanh")  # by kind
VECTORS = {"AVX512": 512, "AVX2": 256}  # bits, by torch's name of what the CPU has
_Key = tuple[Any, ...]

_decided: dict[_Key, Any] = {}  # the kernel that runs a call, or None: torch.nn's forward
_devices: dict[int, Device] = {}
_lock = threading.Lock()


def choose(module: Any, kind: int, input: Any, hx: Any) -> Any:
    """Returns the kernel that runs a call of `module`, whose place in cost_model.KINDS is `kind`, or
    None: torch.nn's forward runs. torch.compile must not be at work."""
    if hx is not None and type(hx) is not Tensor and states_override_torch(hx):
        return None
    key = _key(module, kind, input)
    if key is None:
        return module.kernel_for(input)
    try:
        kernel = _decided[key]
    except KeyError:
        kernel = _decide(key, module.kernel_for(input))
    if kernel is not None or _obstacle(module, kind, input, hx) is None:
        return kernel
    return module.kernel_for(input)


def explain(module: Any, input: Any, hx: Any = None) -> str:
    """Says what a call of one of flashcell's recurrent modules would run, and why.

        print(flashcell.explain(module, x))

    With backend="auto" it is torch.nn's forward or our kernels; the text has the predicted time of
    both and the table it comes from. Nothing is computed."""
    if not hasattr(module, "call_kind"):
        raise TypeError(
            f"module is a {type(module).__name__}, but must be flashcell's LSTM, GRU, RNN or a cell: "
            "flashcell.replace turns torch.nn's into these"
        )
    kernel = module.kernel_for(input)  # raises for what is no input
    data = _data(input)
    if kernel is None and module.hidden_size == 0:
        return "torch: the cell has no units"
    if module.kernel_backend != "auto":
        return f"kernel: backend={module.kernel_backend!r} was asked for"
    if states_override_torch(hx) or (kernel is None and overrides_torch(module, data)):
        return "torch: the input, a state or the weights have a __torch_function__ of their own"
    if kernel is None:
        device = data.device.type
        info = kernel_info("fused-rnn", device)
        if info.source == "reference":
            return f"torch: no kernel here: {info.reason}"
        kind = data.dtype if data.layout is torch.strided else data.layout
        return f"torch: no kernel of ours runs {kind} on {device}"
    key = _key(module, module.call_kind, input)
    found = None if key is None else _predict(key)
    if found is None:
        return f"kernel: no table has the costs of such calls on {data.device.type}"
    times = (
        f"torch.nn's forward is predicted to take {found.torch_us:.0f} us and our kernels "
        f"{found.kernel_us:.0f} us (by {found.source}; torch.nn's runs where it is predicted to take "
        f"less than {found.margin:g} times the time of ours)"
    )
    if not found.torch_wins:
        return f"kernel: {times}"
    obstacle = _obstacle(module, module.call_kind, input, hx)
    return f"torch: {times}" if obstacle is None else f"kernel: {obstacle}, although {times}"


def _data(input: Any) -> Tensor:
    return input.data if isinstance(input, PackedSequence) else input


def _key(module: Any, kind: int, input: Any) -> _Key | None:
    """Returns what the decision depends on, or None for a call about which no table says anything."""
    packed = 0
    if type(input) is not Tensor:
        if type(input) is not PackedSequence:
            return None
        packed, input = input.batch_sizes.shape[0], input.data
        if type(input) is not Tensor:
            return None
    weight = weight_of(module, "weight_ih" if kind >= CELLS else "weight_ih_l0")
    if type(weight) is not Parameter:
        return None
    code = CODES.get(input.dtype)
    if code is None or input.layout is not torch.strided:
        return None
    if input.is_cpu:
        device = -torch.get_num_threads()
    elif input.is_cuda:
        device = input.get_device()
        if code == CODES[torch.float32] and _fp32_precision(kind) == "tf32":
            code = TF32
    else:
        return None
    trains = torch.is_grad_enabled() and (weight.requires_grad or input.requires_grad)
    sizes = kind, input.shape, module.hidden_size, code, trains, device
    if kind >= CELLS:
        return sizes
    form = module.num_layers, module.bidirectional, module.proj_size, module.batch_first
    return (*sizes, packed, *form)


def _fp32_precision(kind: int) -> str:
    return product_precision() if kind >= CELLS else recurrent_precision()


def _decide(key: _Key, kernel: Any) -> Any:
    """Decides for a key that is not in the cache. Two threads may do so at once: they agree."""
    prediction = None if kernel is None else _predict(key)
    if prediction is not None and prediction.torch_wins:
        kernel = None
    with _lock:
        if len(_decided) >= MOST_CALLS:
            _decided.clear()
        _decided[key] = kernel
    return kernel


def _predict(key: _Key) -> Prediction | None:
    call, device = _call(key), key[5]
    if call is None:
        return None
    if device not in _devices:
        _devices[device] = describe(device)
    if device >= 0 and call.kind < CELLS:
        call = with_engine(call, _devices[device].capability)
    own, shipped = (nearest(table, _devices[device]) for table in cost_tables.tables())
    # The user's own measurements count for the device they were made on.
    same = own is not None and own["capability"] == _devices[device].capability
    entry = own if same else shipped
    return None if entry is None else predict(entry, call)


def with_engine(call: Call, capability: int) -> Call:
    """Returns the call with the engine that fused-rnn's planner chooses on a GPU, followed by
    " layers" if layers run side by side; without one if it does not know the GPU."""
    precision = PRECISIONS[call.precision]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    width = padded_width("cuda", dtype, call.steps, call.width, call.batch)
    kernel = load_kernel("fused-rnn", "cuda" if torch.cuda.is_available() else "cpu")
    cell, sizes = ENGINE_CELLS[call.kind], (width, call.batch, dtype, capability, call.steps)
    products = "tf32" if precision == "tf32" else "highest"
    try:
        engine = kernel.explain_plan(cell, call.directions, *sizes, products).engine
        one_way = call.directions == 1 and not call.projection and not call.packed
        if one_way and kernel.explain_layers(
            cell, call.layers, *sizes, products, training=bool(call.trains)
        ):
            engine += " layers"
    except (RuntimeError, ValueError):
        return call
    return call._replace(engine=engine)


def _call(key: _Key) -> Call | None:
    kind, shape, width, code, trains, _, *form = key
    if kind >= CELLS:
        if len(shape) not in (1, 2):
            return None
        batch = shape[0] if len(shape) == 2 else 1
        return Call(kind, 1, 1, 0, batch, 1, shape[-1], width, code, int(trains), 0)
    packed, layers, bidirectional, projection, batch_first = form
    if len(shape) != (2 if packed else 3) and not (len(shape) == 2 and not packed):
        return None
    if packed:
        batch, steps = -(-shape[0] // packed), packed
    elif len(shape) == 2:
        batch, steps = 1, shape[0]
    else:
        batch, steps = shape[:2] if batch_first else (shape[1], shape[0])
    if 0 in (batch, steps):
        return None
    directions = 2 if bidirectional else 1
    sizes = layers, directions, projection, batch, steps, shape[-1], width, code
    return Call(kind, *sizes, int(trains), int(packed > 0))


def _obstacle(module: Any, kind: int, input: Any, hx: Any) -> str | None:
    """Returns why torch.nn's forward would not keep what our modules promise, or None."""
    data = input.data if type(input) is PackedSequence else input
    if transforms_are_active():
        return "a transform of torch.func is active"
    if forward_level() >= 0:
        return "forward-mode derivatives are taken"
    if is_tracing():
        return "the call is traced"
    # Comparing two devices takes several times as long as comparing their numbers.
    index, dtype = data.get_device(), data.dtype
    on_gpu = index >= 0
    if torch.is_autocast_enabled("cuda" if on_gpu else "cpu"):
        return "autocast is enabled"
    weight = weight_of(module, "weight_ih" if kind >= CELLS else "weight_ih_l0")
    same = weight.dtype is dtype and weight.get_device() == index
    if not same or data.layout is not torch.strided:
        return "the input is not of the weights' dtype, device and layout"
    if hx is not None:
        pair = kind % CELLS == 0
        if pair and (type(hx) is not tuple or len(hx) != 2):
            return "hx is no tuple of two tensors"
        for state in hx if pair else (hx,):
            if not isinstance(state, Tensor) or state.dtype is not dtype:
                return "a state is no tensor of the input's dtype"
            form = type(state)
            plain = form is Tensor or form is Parameter
            if not plain or state.get_device() != index or state.is_meta:
                return "a state is a tensor subclass or on another device"
    if on_gpu:
        return _obstacle_on_gpu(module, kind, weight)
    return None


def _obstacle_on_gpu(module: Any, kind: int, weight: Tensor) -> str | None:
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on"
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    if "FLASHCELL_CUDA_ENGINE" in os.environ:
        return "FLASHCELL_CUDA_ENGINE is set"
    # torch.nn flattens no bf16 weights, so its measured times include the copy of the weights.
    if kind < CELLS and weight.dtype != torch.bfloat16 and not weights_are_flat(module):
        return "cuDNN would copy the weights, which are not in one storage"
    return None


def _cpu_name() -> str:
    """Returns the CPU's name as Linux has it, such as "AMD EPYC 9R14"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def describe(device: int) -> Device:
    """Describes a GPU by its index, or the CPU with -device threads."""
    if device < 0:
        bits = VECTORS.get(torch.backends.cpu.get_cpu_capability(), 128)
        return Device("cpu", _cpu_name(), bits, -device)
    gpu = torch.cuda.get_device_properties(device)
    return Device("cuda", gpu.name, 10 * gpu.major + gpu.minor, gpu.multi_processor_count)
