"""Converts state dicts of the `xlstm` package's xLSTMLMModel to flash_xlstm's.

What differs besides names: its norms multiply by 1 + weight; an sLSTM's `fgate` feeds the input gate
and its `igate` the forget gate; and the two backends of its sLSTM keep the recurrent weight and the
bias in different layouts, told apart by the weight's shape.
"""

import re
from typing import Any

import torch

Weights = dict[str, torch.Tensor]

STACK, BLOCK = "xlstm_block_stack.", re.compile(r"^xlstm_block_stack\.blocks\.(\d+)\.(.+)$")
OUTSIDE = {
    "token_embedding.weight": "model.embed_tokens.weight",
    f"{STACK}post_blocks_norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
SAME = {
    "xlstm.proj_up.weight": "mixer.proj_up.weight",
    "xlstm.proj_down.weight": "mixer.proj_down.weight",
    "xlstm.learnable_skip": "mixer.skip",
    "xlstm.mlstm_cell.igate.weight": "mixer.igate.weight",
    "xlstm.mlstm_cell.igate.bias": "mixer.igate.bias",
    "xlstm.mlstm_cell.fgate.weight": "mixer.fgate.weight",
    "xlstm.mlstm_cell.fgate.bias": "mixer.fgate.bias",
    "xlstm.conv1d.conv.weight": "mixer.conv.weight",
    "xlstm.conv1d.conv.bias": "mixer.conv.bias",
    "ffn.proj_up.weight": "mlp.proj_up.weight",
    "ffn.proj_down.weight": "mlp.proj_down.weight",
}
NORMS = {
    "xlstm_norm.weight": "mixer_norm.weight",
    "xlstm.mlstm_cell.outnorm.weight": "mixer.head_norm.weight",
    "xlstm.group_norm.weight": "mixer.head_norm.weight",
    "ffn_norm.weight": "mlp_norm.weight",
}
STACKED = {  # our name -> the package's names, in the order of our gates
    "mixer.qk_proj.weight": ("xlstm.q_proj.weight", "xlstm.k_proj.weight"),
    "mixer.v_proj.weight": ("xlstm.v_proj.weight",),
    "mixer.if_proj.weight": ("xlstm.fgate.weight", "xlstm.igate.weight"),
    "mixer.zo_proj.weight": ("xlstm.zgate.weight", "xlstm.ogate.weight"),
}
RECURRENT, BIAS = "xlstm.slstm_cell._recurrent_kernel_", "xlstm.slstm_cell._bias_"
GATES = 4


def split_blocks(state_dict: Weights) -> tuple[Weights, list[Weights]]:
    """Splits a state dict into the weights outside the blocks and each block's, with their prefix
    removed."""
    outside: Weights = {}
    blocks: dict[int, Weights] = {}
    for name, weight in state_dict.items():
        found = BLOCK.match(name)
        if found is None:
            outside[name] = weight
        else:
            blocks.setdefault(int(found[1]), {})[found[2]] = weight
    missing = [name for name in OUTSIDE if name not in outside]
    if missing or not blocks or sorted(blocks) != list(range(len(blocks))):
        numbers = ", ".join(map(str, sorted(blocks))) or "none"
        had = f"has no {', '.join(missing)}" if missing else f"has these blocks: {numbers}"
        raise ValueError(
            f"state_dict {had}, but must be that of an xLSTMLMModel: its blocks from 0 on without a "
            "gap, a norm after the last one, embedding and head"
        )
    return outside, [blocks[i] for i in range(len(blocks))]


def convert_xlstm(state_dict: Weights) -> Weights:
    """Returns the weights for FlashXLSTMForCausalLM; unknown names are kept unchanged."""
    outside, blocks = split_blocks(state_dict)
    weights = {OUTSIDE.get(name, name): weight for name, weight in outside.items()}
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1
    for i, block in enumerate(blocks):
        weights |= {f"model.layers.{i}.{name}": w for name, w in convert_block(block).items()}
    return weights


def convert_block(block: Weights) -> Weights:
    block = dict(block)
    weights = {ours: block.pop(name) for name, ours in SAME.items() if name in block}
    weights |= {ours: block.pop(name) + 1 for name, ours in NORMS.items() if name in block}
    for ours, names in STACKED.items():
        if all(name in block for name in names):  # each [N, out, in]
            weights[ours] = torch.stack([block.pop(name) for name in names], dim=1)
    if RECURRENT in block and BIAS in block:
        weight, bias = block.pop(RECURRENT), block.pop(BIAS)
        heads, rows, columns = weight.shape
        if rows == GATES * columns:  # "vanilla": [N, (gate, out), in], bias (gate, N, out)
            weight = weight.view(heads, GATES, columns, columns).permute(1, 0, 2, 3)
            bias = bias.view(GATES, heads, columns)
        else:  # "cuda": [N, in, (gate, out)], bias (N, gate, out)
            weight = weight.view(heads, rows, GATES, rows).permute(2, 0, 3, 1)
            bias = bias.view(heads, GATES, rows).transpose(0, 1)
        weights["mixer.recurrent_weight"] = weight.contiguous()
        weights["mixer.gate_bias"] = bias.contiguous()
    return weights | block


def describe_xlstm(state_dict: Weights) -> dict[str, Any]:
    """Returns the arguments of FlashXLSTMConfig that follow from the weights' shapes and names."""
    outside, blocks = split_blocks(state_dict)
    embedding, head = outside["token_embedding.weight"], outside["lm_head.weight"]
    vocabulary, width = embedding.shape
    slstm_at = [i for i, block in enumerate(blocks) if RECURRENT in block]
    told: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": len(blocks),
        "slstm_at": slstm_at,
        "tie_word_embeddings": head.data_ptr() == embedding.data_ptr(),
    }
    for block in blocks:
        if "xlstm.conv1d.conv.weight" in block:
            told["conv_kernel_size"] = block["xlstm.conv1d.conv.weight"].shape[-1]
        if RECURRENT in block:
            told["slstm_num_heads"] = block[RECURRENT].shape[0]
        if "ffn.proj_down.weight" in block:
            told["intermediate_size"] = block["ffn.proj_down.weight"].shape[1]
        if "xlstm.learnable_skip" in block:
            told["inner_size"] = block["xlstm.learnable_skip"].shape[0]
            told["num_heads"] = block["xlstm.mlstm_cell.igate.weight"].shape[0]
            told["qkv_block_size"] = block["xlstm.q_proj.weight"].shape[-1]
    return told
