"""Drop-in modules for torch.nn's recurrent ones, on the fused-rnn kernels.

Each is a subclass of the torch.nn module of its name, so parameters, their initialisation, state
dicts, isinstance and repr are torch's. They differ in `forward`, and in one keyword more:

    backend   "auto"|"cuda"|"cpu"|"reference", see kernel_loader.py; kept as kernel_backend. "auto"
              runs torch.nn's own forward where there is no kernel, or where that is measured to be
              the faster one (choice/backend_choice.py); flashcell.explain(module, input) says which

Sequence modules, h0 and c0 as torch.nn documents them (`nn.LSTM`, `nn.GRU`, `nn.RNN`):

    input     [T, B, I], [B, T, I] with batch_first, [T, I], or a PackedSequence
    output    the same kind with width directions * (proj_size or hidden_size)
    h_n       [layers * directions, B, proj_size or hidden_size], for the LSTM (h_n, c_n)

dtypes: bf16, fp16, fp32, fp64; outputs and states come in the input's, under torch.autocast in
autocast's, as cuDNN has it (torch.nn on the CPU leaves some in fp32: the GRU's, packed ones, a
projected LSTM's c_n). Between the steps states of our kernels are fp32 (fp64). An initial state may have another
dtype than the input. Products of fp32 recurrences on CUDA follow `torch.backends.cudnn.rnn.fp32_precision`, which
`torch.backends.cudnn.allow_tf32` sets too; those of a cell `torch.backends.cuda.matmul.fp32_precision`.

Errors are torch.nn's: RuntimeError and ValueError for shapes and dtypes that do not fit the module.

What differs: dropout draws other numbers from the same seed; outputs of our kernels are contiguous
with batch_first too, those of torch.nn's forward are not; gradients that are to be differentiated
again (create_graph=True) are computed by torch's own code, which takes longer and gives a warning;
derivatives in forward mode (torch.func.jvp) are those of plain PyTorch code, also with a warning;
autograd has one node for all results of a call, as for cuDNN's: a hook of a result that the loss does
not use gets None, and an LSTMCell's h' does not depend on the tensor c'; an infinite or NaN weight of
h does not show in a first step without an initial state; there is no torch.jit.script (an error says
so). torch.compile breaks the graph at every module that is an nn.LSTM, nn.GRU or nn.RNN, these too;
with torch._dynamo.config.allow_rnn = True these compile with fullgraph=True. A cell in a loop that
torch.compile leaves out of its graph is compiled on its own, which takes seconds; torch.nn's is not.
torch.export takes all of them as they are, and torch.onnx.export writes ONNX's own operators
(onnx_export.py).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.rnn import RNNBase, RNNCellBase
from torch.nn.utils.rnn import PackedSequence

from ..choice.backend_choice import choose
from ..choice.cost_model import KINDS
from ..choice.overrides import overrides_torch
from ..hub.kernel_loader import check_backend, load_kernel
from ..kernels import fused_rnn
from ..kernels.fused_rnn.forward import run_cell, run_sequence
from ..kernels.fused_rnn.private_names import frame_callback, set_frame_callback
from .onnx_export import export_sequence, is_onnx_export


class _StandIn(nn.Module):
    """Adds to torch.nn's recurrent modules what all replacements share: backend, kernel and
    forward."""

    kernel_backend = "auto"  # for pickles of torch.nn's modules, which have none
    call_kind: int  # a place in cost_model.KINDS

    def stand_in(self, backend: str) -> None:
        """Sets the attributes that a torch.nn module needs in order to work as one of flashcell's.

        torch.fx and the tools built on it treat a module as a leaf if its `__module__` begins with
        "torch.nn". It is set on the object only, because pickle finds the class by the class's own.
        """
        # not through a user's own __setattr__
        vars(self).update(kernel_backend=check_backend(backend), __module__="torch.nn")

    def __prepare_scriptable__(self) -> None:  # torch.jit.script calls this first
        raise NotImplementedError(
            f"torch.jit.script cannot compile flashcell's {type(self).__name__}: use torch.jit.trace or "
            "torch.export, or script torch.nn's module (flashcell.restore undoes flashcell.replace)"
        )

    def kernel_for(self, input: Any) -> Any:
        """Returns fused-rnn's functions for the device of `input`, or None: run torch.nn's own
        forward.

        None means that "auto" found no kernel for the device and dtype, or that the input or the weights
        have a __torch_function__ of their own, which may know torch's functions only. `choose` also
        looks at the states."""
        data = input.data if isinstance(input, PackedSequence) else input
        auto = self.kernel_backend == "auto"
        if auto and not torch.compiler.is_compiling() and overrides_torch(self, data):
            return None
        if not isinstance(data, Tensor):  # raises AttributeError, as torch.nn does
            kind, allowed = type(input).__name__, "a tensor or a PackedSequence"
            allowed = "a tensor" if isinstance(self, RNNCellBase) else allowed
            raise AttributeError(f"input is a {kind}, but must be {allowed}")
        fallback = "torch.nn's own forward"
        kernel = load_kernel("fused-rnn", data.device.type, self.kernel_backend, fallback)
        if auto:
            # No CUDA kernel has fp64, and none has complex numbers or sparse tensors.
            no_kernel = data.is_complex() or data.layout is not torch.strided
            no_kernel = no_kernel or (data.is_cuda and data.dtype == torch.float64)
            return None if no_kernel or kernel is fused_rnn else kernel
        return kernel

    def choose_kernel(self, input: Any, hx: Any) -> Any:
        """Returns the kernel that runs a call, or None: run torch.nn's own forward."""
        compiles = torch.compiler.is_compiling()
        if is_onnx_export(compiles):
            return None
        if compiles or self.kernel_backend != "auto":
            return self.kernel_for(input)
        return choose(self, self.call_kind, input, hx)


class _Sequence(_StandIn, RNNBase):
    def __init__(self, *args: Any, backend: str = "auto", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.stand_in(backend)

    def flatten_parameters(self) -> None:
        """Moves the weights on a GPU into one storage, where cuDNN reads them; our kernels read them
        anywhere."""
        if not torch.compiler.is_compiling():  # Dynamo cannot trace it
            super().flatten_parameters()

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Runs the layers, as torch.nn does: input, hx -> output, h_n or (h_n, c_n)."""
        # If torch.compile leaves this module out of its graph, it would compile parts of this call,
        # which it never does with torch.nn's modules. So it is switched off during the call.
        if not torch.compiler.is_compiling() and callable(frame_callback()):
            before = set_frame_callback(None)
            try:
                return _Sequence.forward(self, input, hx)
            finally:
                set_frame_callback(before)
        kernel = self.choose_kernel(input, hx)
        if kernel is None and torch.compiler.is_compiling() and is_onnx_export(True):
            return export_sequence(self, input, hx)
        if kernel is None:
            return super().forward(input, hx)
        return run_sequence(self, kernel, input, hx)


class LSTM(_Sequence, nn.LSTM):
    """Long short-term memory in place of torch.nn.LSTM (Hochreiter & Schmidhuber 1997, forget gate).

        i, f, o = sigmoid(W x + b + R h + b')    g = tanh(W_g x + b_g + R_g h + b'_g)
        c' = f c + i g                           h' = o tanh(c'), with proj_size h' = W_hr o tanh(c')

    LSTM(input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0,
    bidirectional=False, proj_size=0, device=None, dtype=None, *, backend="auto"); forward(input,
    (h_0, c_0)=None) -> output, (h_n, c_n). Shapes, dtypes and errors: see the module.
    """

    call_kind = KINDS.index("LSTM")


class GRU(_Sequence, nn.GRU):
    """Gated recurrent unit in place of torch.nn.GRU (arXiv 1406.1078v1, reset after the product).

        r, z = sigmoid(W x + b + R h + b')       n = tanh(W_n x + b_n + r (R_n h + b'_n))
        h' = (1 - z) n + z h

    GRU(input_size, hidden_size, num_layers=1, bias=True, batch_first=False, dropout=0.0,
    bidirectional=False, device=None, dtype=None, *, backend="auto"); forward(input, h_0=None) ->
    output, h_n. Shapes, dtypes and errors: see the module.
    """

    call_kind = KINDS.index("GRU")


class RNN(_Sequence, nn.RNN):
    """Elman's network (1990) in place of torch.nn.RNN:  h' = act(W x + b + R h + b'), act tanh or relu.

    RNN(input_size, hidden_size, num_layers=1, nonlinearity="tanh", bias=True, batch_first=False,
    dropout=0.0, bidirectional=False, device=None, dtype=None, *, backend="auto"); forward(input,
    h_0=None) -> output, h_n. Shapes, dtypes and errors: see the module.
    """

    call_kind = KINDS.index("RNN")


class _Cell(_StandIn, RNNCellBase):
    kernel_cell: str

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        backend: str = "auto",
    ):
        # torch.nn's cell is next in the order of bases, and takes no num_chunks.
        super().__init__(input_size, hidden_size, bias, device=device, dtype=dtype)  # type: ignore[call-arg]
        self.stand_in(backend)

    def kernel_for(self, input: Any) -> Any:
        kernel = super().kernel_for(input)
        return None if self.hidden_size == 0 else kernel  # torch.nn's cells may have no units

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Runs one step, as torch.nn does: input [B, I] or [I], states [B, D] or [D] -> h' or (h',
        c')."""
        kernel = self.choose_kernel(input, hx)
        if kernel is None:
            return super().forward(input, hx)
        return run_cell(self, kernel, self.kernel_cell, input, hx)


class LSTMCell(_Cell, nn.LSTMCell):
    """One step of `LSTM`, in place of torch.nn.LSTMCell: input, (h, c)=None -> h', c'."""

    kernel_cell = "lstm"
    call_kind = KINDS.index("LSTMCell")


class GRUCell(_Cell, nn.GRUCell):
    """One step of `GRU`, in place of torch.nn.GRUCell: input, h=None -> h'."""

    kernel_cell = "gru"
    call_kind = KINDS.index("GRUCell")


class RNNCell(_Cell, nn.RNNCell):
    """One step of `RNN`, in place of torch.nn.RNNCell: input, h=None -> h'."""

    call_kind = KINDS.index("RNNCell")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
        *,
        backend: str = "auto",
    ):
        # Not by the name nn.RNNCell, in whose place somebody may have put this class.
        super(_Cell, self).__init__(input_size, hidden_size, bias, nonlinearity, device, dtype)  # type: ignore[call-arg]
        self.stand_in(backend)

    @property
    def kernel_cell(self) -> str:  # type: ignore[override]
        if self.nonlinearity not in ("tanh", "relu"):
            raise RuntimeError(f"Unknown nonlinearity: {self.nonlinearity}")
        return f"rnn_{self.nonlinearity}"
