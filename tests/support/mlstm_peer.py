"""The reference with which tfla is compared if both round to 16 bits."""

from flashcell.kernels import tfla as reference


class Peer:
    """The reference in its own dtype, except that h and its gradient between the cell and the
    epilogue are rounded to 16 bits, as the ops do. With a norm after it, what remains of the
    divisor's gradient, -(dh h) / N, is such that dh h is 1e-7 of |dh| |h|, and its roundings are
    4e-4."""

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
