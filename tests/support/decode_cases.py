"""Ways to decode, and changes to a model that a recorded step would not notice by itself."""

import copy

import torch
from transformers import DynamicCache


def greedy(model, ids, new=12, **kwargs):
    kwargs = {"attention_mask": torch.ones_like(ids), "do_sample": False, **kwargs}
    return model.generate(ids, max_new_tokens=new, pad_token_id=0, **kwargs)


def without_engine(model, work):
    model.decoder.mode = "eager"
    try:
        return work()
    finally:
        model.decoder.mode = "auto"


def same_as_plain(model, work):
    """Returns the result of the engine, asserting that the model without the engine gives the same."""
    got = work()
    assert model.decoder.path in ("graph", "tape"), model.decoder.reason
    assert torch.equal(got, without_engine(model, work))
    return got


CHANGES = {
    "data": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data.clone()),
    "parameter": lambda m: setattr(
        m.lm_head, "weight", torch.nn.Parameter(m.lm_head.weight.detach().clone())
    ),
    "module": lambda m: setattr(m.model.layers[0], "mlp", copy.deepcopy(m.model.layers[0].mlp)),
    "adapter": lambda m: setattr(
        m.model.layers[0], "mlp", torch.nn.Sequential(m.model.layers[0].mlp)
    ),
    "hook": lambda m: m.model.layers[1].mixer.register_forward_hook(lambda *_: None),
    "pre-hook": lambda m: m.model.norm.register_forward_pre_hook(lambda *_: None),
    "submodule moved": lambda m: m.model.layers[0]._apply(torch.clone),
    "backend": lambda m: setattr(m.config, "backend", "reference"),
    "assigned": lambda m: m.load_state_dict(
        {k: v.clone() for k, v in m.state_dict().items()}, assign=True
    ),
}


def decode(model, ids, cache=None):
    """Returns the logits of every token, decoded one by one."""
    cache, steps = cache or DynamicCache(config=model.config), []
    with torch.no_grad():
        for token in ids.split(1, dim=1):
            steps.append(model(token, past_key_values=cache).logits)
    return torch.cat(steps, 1)
