"""The reference for tests of tfla in 16 bits: it rounds where tfla rounds."""

from flashcell.kernels import tfla as reference


class Peer:
    """The reference in its own dtype, except that h and its gradient between the cell and the
    epilogue are rounded to 16 bits, as the ops do.

    This matters in the divisor's gradient, -(dh h) / N: if a norm follows, the terms of dh h cancel
    to 1e-7 of |dh| |h|, and the rounding is 4e-4."""

    @staticmethod
    def mlstm(**call):
        names = ("out_gate", "norm", "norm_weight", "norm_eps")
        end = {name: call.pop(name, None) for name in names}
        h, last = reference.mlstm(**call)
        if end["norm"] is None and end["out_gate"] is None:
            return h, last
        end["norm_eps"] = end["norm_eps"] or 1e-6
        wide = h.to(last[0].dtype)
        return reference.functional.finish("reference", wide, h.dtype, **end), last
