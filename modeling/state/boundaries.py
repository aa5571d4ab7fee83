"""Translates transformers' padding and packing arguments to the kernels', and cuts long prompts."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn


class Boundaries(NamedTuple):
    """The kernels' arguments for document boundaries and padding."""

    reset: torch.Tensor | None = None  # [B, T] bool: the state is emptied before this token
    hold: torch.Tensor | None = None  # [B, T] bool: padding, the state passes through
    cu_seqlens: torch.Tensor | None = None  # [S + 1] int: offsets of the documents of one row

    def none(self) -> bool:  # no property: torch 2.10's Dynamo cannot trace one in a named tuple
        return self.reset is None and self.hold is None and self.cu_seqlens is None

    def first(self, states: tuple | None) -> tuple | None:
        """Returns the states to continue from: none with offsets, where every document begins
        anew."""
        return states if self.cu_seqlens is None else None

    def last(self, states: tuple) -> tuple:
        """Returns the states to keep: with offsets, those of the last document."""
        return states if self.cu_seqlens is None else tuple(s[-1:] for s in states)


NO_BOUNDARIES = Boundaries()


def find_boundaries(
    batch: int,
    length: int,
    attention_mask: torch.Tensor | None = None,  # [B, >= T], 0 = padding; the last T columns count
    position_ids: torch.Tensor | None = None,  # [B or 1, T], 0 = first token of a document
    cu_seq_lens: torch.Tensor | None = None,  # [S + 1]
    seq_idx: torch.Tensor | None = None,  # [B or 1, T], number of a token's document
) -> Boundaries:
    """Translates transformers' arguments for padding and for packed documents.

    `cu_seq_lens` takes precedence; otherwise a document begins where `position_ids` or `seq_idx`
    say so. Both are ignored at padding. If a document begins with padding, its first real token
    marks the beginning: by its document number, or by a position that does not continue the text
    before.
    """
    hold = reset = None
    given = {"attention_mask": attention_mask, "position_ids": position_ids, "seq_idx": seq_idx}
    check_tensors(**given, cu_seq_lens_q=cu_seq_lens)
    if attention_mask is not None:
        shape = attention_mask.shape
        if len(shape) != 2 or shape[0] != batch or shape[1] < length:
            raise _shape_error("attention_mask", attention_mask, f"[{batch}, at least {length}]")
        hold = attention_mask[:, attention_mask.shape[1] - length :] == 0
    if cu_seq_lens is not None:
        if cu_seq_lens.dim() != 1 or batch != 1:
            had = f"cu_seq_lens_q has shape {list(cu_seq_lens.shape)} for a batch of {batch}"
            raise ValueError(f"{had}, but must have one dimension and the batch must be 1")
        return Boundaries(hold=hold, cu_seqlens=cu_seq_lens)
    for name, ids in (("position_ids", position_ids), ("seq_idx", seq_idx)):
        if ids is None:
            continue
        if ids.dim() != 2 or ids.shape[0] not in (1, batch) or ids.shape[1] != length:
            raise _shape_error(name, ids, f"[{batch} or 1, {length}]")
        ids = ids.expand(batch, length)
        if hold is not None:
            first = _first_real(name, ids, hold)
        elif name == "seq_idx":
            first = nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
        else:
            first = ids == 0
        reset = first if reset is None else reset | first
    return Boundaries(reset, hold)


def check_tensors(**given: Any) -> None:
    """Raises TypeError for an argument that is neither a tensor nor None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}, but must be a tensor")


def is_full(mask: Any) -> bool:
    """Whether a padding mask [B, T], or None, says that there is no padding: then each layer of a prompt
    takes fewer operations without it. On a GPU the answer waits for the mask."""
    if mask is None:
        return True
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())


def cut_prompt(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    *,
    tokens: int,
    cache: Any,
    rest: dict[str, Any],
    tried: int = 0,
) -> list[tuple[torch.Tensor | None, ...]]:
    """Cuts the arguments of a prompt into chunks of at most `tokens` tokens, in multiples of 256
    per row.

    The last `tried` tokens are a chunk of their own. A prompt stays whole while gradients are
    recorded, if its documents are given by number or offset, if the outputs of all layers are
    requested (unless tokens are tried), and if `cache` takes its states from another rank.
    """
    whole = (input_ids, inputs_embeds, position_ids, attention_mask)
    given = input_ids if inputs_embeds is None else inputs_embeds
    plain = ("use_cache", *(("output_hidden_states", "output_attentions") if tried else ()))
    others = any(v is not None and v is not False for k, v in rest.items() if k not in plain)
    if given is None or others or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return [whole]
    if not all(getattr(layer, "goes_on", True) for layer in getattr(cache, "layers", ())):
        return [whole]
    B, T = given.shape[:2]
    size = max(tokens // max(B, 1) // 256, 1) * 256
    starts = [*range(0, T - tried, size), *([T - tried] if tried else [])]
    if len(starts) < 2:
        return [whole]
    if attention_mask is not None:
        attention_mask = attention_mask[:, -T:]
        if position_ids is not None:
            reset = find_boundaries(B, T, attention_mask, position_ids).reset
            position_ids = count_from(reset)  # counted over the text, not in each chunk
    whole = (input_ids, inputs_embeds, position_ids, attention_mask)
    return [
        tuple(None if t is None else t[:, start:end] for t in whole)
        for start, end in pairwise([*starts, T])
    ]


def join_chunks(parts: list[Any]) -> Any:  # for each chunk None, or [B, T, H] for each layer
    """Joins the hidden states of the chunks."""
    if len(parts) == 1 or parts[0] is None:
        return parts[-1]
    return tuple(torch.cat(layer, 1) for layer in zip(*parts, strict=True))


def check_prompt(
    name: str,
    prompt: torch.Tensor,  # [B, T] or [B, T, H]
    attention_mask: torch.Tensor | None,
    cache: Any,
) -> None:
    """Raises a clear error for a prompt or a mask of a wrong shape, before `generate` changes
    them."""
    for what, value in ((name, prompt), ("attention_mask", attention_mask)):
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{what} is a {type(value).__name__}, but must be a tensor")
    shape = list(prompt.shape)
    if len(shape) < 2 or 0 in shape[:2]:
        raise ValueError(
            f"{name} has shape {shape}, but must be [B, T{', H' * (name == 'inputs_embeds')}] with at "
            "least one row and one token: to begin without a prompt, pass none and a bos_token_id"
        )
    if attention_mask is None:
        return
    B, T = shape[:2]
    past = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
    lengths = sorted({T, T + past})  # with the whole text, or its new tokens alone
    if attention_mask.dim() != 2 or list(attention_mask.shape) not in [[B, n] for n in lengths]:
        wanted = " or ".join(f"[{B}, {n}]" for n in lengths)
        after = f", or the cache's {past} tokens and these" if past else ""
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, but must be {wanted}: a column "
            f"for each token of {name}{after}"
        )


def _first_real(name: str, ids: torch.Tensor, hold: torch.Tensor) -> torch.Tensor:  # each [B, T]
    """Returns where the first real token of each document is, found from the real token before
    it."""
    at = torch.arange(ids.shape[1], device=hold.device)
    last = torch.where(hold, -1, at).cummax(1).values
    last = nn.functional.pad(last[:, :-1], (1, 0), value=-1)[:, : ids.shape[1]]
    before = ids.gather(1, last.clamp_min(0))
    if name == "seq_idx":
        first = (last >= 0) & (ids != before)
    else:
        after_padding = (last >= 0) & (last < at - 1)
        first = (ids == 0) | (after_padding & (ids <= before))
    return first & ~hold


def count_from(reset: Any) -> torch.Tensor:  # [B, T]
    """Returns positions that are 0 where a document begins and grow by one with every column."""
    at = torch.arange(reset.shape[1], device=reset.device)
    return at - torch.where(reset, at, -1).cummax(1).values


def _shape_error(name: str, value: torch.Tensor, wanted: str) -> ValueError:
    return ValueError(f"{name} has shape {list(value.shape)}, but must be {wanted}")
