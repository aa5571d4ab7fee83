"""Overrides of `generate` for recurrent models: refused modes and a loop that runs ahead of the
GPU."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..state.assisted import PROMPT_ONLY, AssistedGeneration
from ..state.boundaries import is_full
from ..state.cache import CACHE, NAMES, is_recurrent
from ..state.rollback import takes_back
from ..state.serialization import load_state, save_state
from ..utils.private_names import DeferredStopCheck, StopCheck, pad_token_of, prefill
from .argument_checks import check_call
from .captured_step import Take
from .decode_path import decide_loop, runs_only_known_code


class Text:
    """The token ids so far, [B, T], joined into one tensor only when they are read.

    The loop itself needs the last tokens alone, and a copy of the whole text per token would
    grow."""

    def __init__(self, ids: torch.Tensor):
        self.length = ids.shape[1]
        self._ids, self._new = ids, list[torch.Tensor]()

    def add(self, tokens: torch.Tensor) -> None:  # [B]
        self._new.append(tokens)
        self.length += 1
        if len(self._new) == 256:  # joins them, so that there are few tensors
            self.read()

    def read(self) -> torch.Tensor:
        if self._new:
            self._ids = torch.cat([self._ids, torch.stack(self._new, 1)], -1)
            self._new = []
        return self._ids


class Ends:
    """Applies the stopping criteria after each token, with a fast path for the length and EOS
    criteria.

    The fast path looks at the newest tokens alone; any other criterion gets the whole text."""

    def __init__(self, stopping_criteria: Any, device: torch.device):
        self.criteria, self.tokens = stopping_criteria, list[torch.Tensor]()
        lengths = [c for c in stopping_criteria if type(c) is MaxLengthCriteria]
        self.usual = len(lengths) == 1 and lengths[0].max_position_embeddings is None
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                self.tokens.append(criterion.eos_token_id.to(device))
            elif criterion not in lengths:
                self.usual = False
        self.max_length = stopping_criteria.max_length

    def go_on(self, going: torch.Tensor, tokens: torch.Tensor, text: Text) -> torch.Tensor:
        """Returns `going` [B] without the rows that end at `tokens`; `full` checks the length
        limit."""
        if not self.usual:
            return going & ~self.criteria(text.read(), None)
        for ends in self.tokens:
            same = tokens != ends if ends.numel() == 1 else torch.isin(tokens, ends, invert=True)
            going = going & same
        return going

    def full(self, text: Text) -> bool:
        return self.usual and text.length >= self.max_length


class HostCheck(StopCheck):
    """Checks for the end of all rows on the CPU, where nothing has to be copied first."""

    def __call__(self, going: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
        return not going.any()


def device_of_tokens(model: Any, ids: torch.Tensor) -> torch.device:
    """Returns the device for input tokens: the model's, or that of `ids` if its weights are
    offloaded."""
    return ids.device if model.device.type == "meta" else model.device


class RecurrentGeneration(AssistedGeneration):
    """GenerationMixin for recurrent models, with `save_state` and `load_state`
    (serialization.py)."""

    save_state, load_state = save_state, load_state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if torch.__future__.get_swap_module_params_on_conversion():
            self.decoder.release()  # torch refuses to swap a tensor that has views
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Checks the prompt and the generation mode before transformers' generate derives others
        from them."""
        check_call(self, args, kwargs)
        names = dict.fromkeys(NAMES, CACHE)
        return super().generate(*args, **{names.get(n, n): v for n, v in kwargs.items()})

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: torch.Tensor, model_kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Returns positions only where there is padding, behind which they tell that a text begins."""
        if is_full(model_kwargs.get("attention_mask")):
            return None
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        next_sequence_length: int | None = None,
        inputs_embeds: torch.FloatTensor | None = None,  # generate looks for it here
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Prepares the inputs of one forward call; for a single decoded token, drops mask and
        positions, and for a prompt without padding both too.

        In a batch, rows that have ended go on reading padding until the last one ends: continue
        such a conversation from its text, not from the returned cache.
        """
        if next_sequence_length is not None and next_sequence_length < 1:
            name = "input_ids" if inputs_embeds is None else "inputs_embeds"
            given: Any = input_ids if inputs_embeds is None else inputs_embeds
            raise ValueError(
                f"the cache already holds {kwargs[CACHE].get_seq_length()} tokens, but {name} has "
                f"{given.shape[1]}: pass the whole text, or the new tokens and an attention_mask over "
                "the whole text"
            )
        cache: Any = kwargs.get(CACHE)
        if takes_back(cache) and cache.get_seq_length() and not is_first_iteration:
            kwargs = {k: v for k, v in kwargs.items() if k not in PROMPT_ONLY}
        next_sequence_length = self._add_owed(
            input_ids, next_sequence_length, is_first_iteration, kwargs
        )
        if next_sequence_length == 1 and not is_first_iteration:
            token = input_ids[:, -1:].to(device_of_tokens(self, input_ids))
            token = token.clone(memory_format=torch.contiguous_format)
            return {"input_ids": token, **{k: v for k, v in kwargs.items() if k not in PROMPT_ONLY}}
        if kwargs.get("position_ids") is None and is_full(kwargs.get("attention_mask")):
            kwargs["attention_mask"] = None
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Passes on the new cache; with one, the mask and the positions need not grow."""
        if outputs.get(CACHE) is None:
            return super()._update_model_kwargs_for_generation(
                outputs, model_kwargs, *args, **kwargs
            )
        return {**model_kwargs, CACHE: outputs[CACHE]}

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Samples by `_sample_ahead` or by the base class's loop (decode_path.decide_loop).

        On a CPU `_sample_ahead` saves Python time. A model that hooks or wrappers run around is
        always called by the base class's loop.
        """
        cache = model_kwargs.get(CACHE)
        if generation_config.is_assistant:
            for layer in filter(is_recurrent, getattr(cache, "layers", ())):
                layer.activate_past_recording()
        loop = decide_loop(
            self, input_ids, logits_processor, stopping_criteria, generation_config, cache,
            model_kwargs.get("use_cache"), synced_gpus,
        )  # fmt: skip
        device = torch.cuda.device(input_ids.device) if input_ids.is_cuda else nullcontext()
        with self._promise(logits_processor, stopping_criteria, cache, streamer):
            if loop.path == "base":
                return super()._sample(
                    input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus,
                    streamer, **model_kwargs,
                )  # fmt: skip
            with device:  # DeferredStopCheck's events are of its stream
                return self._sample_ahead(
                    input_ids, logits_processor, stopping_criteria, generation_config, streamer,
                    model_kwargs,
                )  # fmt: skip

    def _beam_search(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Runs the base class's beam search."""
        cache = kwargs.get(CACHE)
        with self._promise(logits_processor, stopping_criteria, cache):
            return super()._beam_search(
                input_ids, logits_processor, stopping_criteria, *args, **kwargs
            )

    def _promise(
        self, processors: Any, criteria: Any, cache: Any, streamer: Any = None
    ) -> AbstractContextManager[None]:
        """Returns the engine's assume_unchanged() for a loop in which only known code runs."""
        known = streamer is None and runs_only_known_code(self, processors, criteria, cache)
        return self.decoder.assume_unchanged() if known else nullcontext()

    def _sample_ahead(
        self,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Samples tokens, and reads whether all rows have ended one token late.

        The base class's loop waits for that answer after every token and leaves the GPU idle until
        the next step is launched. Here the step computed meanwhile is dropped.
        """
        pad: Any = pad_token_of(generation_config)
        draws = generation_config.do_sample
        pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        pad = pad.to(input_ids.device) if pads else pad
        going = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        text, ends = Text(input_ids), Ends(stopping_criteria, input_ids.device)
        check: StopCheck = HostCheck(streamer)
        if input_ids.is_cuda:
            with torch.device("cpu"):  # whatever the default device is
                check = DeferredStopCheck(
                    input_ids, stopping_criteria.max_length, None, False, streamer
                )
        greedy = not draws and not logits_processor

        def take(logits: torch.Tensor) -> torch.Tensor:
            """Returns the tokens [B] if nothing else decides them, or the scores [B, V]."""
            last = logits[:, -1].to(input_ids.device)
            return last.argmax(-1) if greedy else last.to(torch.float32, copy=True)

        outputs = prefill(self, input_ids, generation_config, model_kwargs)
        model_kwargs = self._update_model_kwargs_for_generation(outputs, model_kwargs)
        taken = take(outputs.logits)
        rest = {k: v for k, v in model_kwargs.items() if k not in (*PROMPT_ONLY, "inputs_embeds")}
        device = device_of_tokens(self, input_ids)
        while True:
            for process in logits_processor:  # LogitsProcessorList would inspect each signature
                taken = process(text.read(), taken)
            if draws:
                tokens = torch.multinomial(taken.softmax(-1), num_samples=1)[:, 0]
            else:
                tokens = taken if greedy else taken.argmax(-1)
            if pads:
                tokens = torch.where(going, tokens, pad)
            text.add(tokens)
            going = ends.go_on(going, tokens, text)
            if check(going, tokens, text.length) or ends.full(text):
                break
            taken = self._take_next(tokens[:, None].to(device), rest, take)
        late = check.finish()
        if streamer is not None:
            streamer.end()
        return text.read()[:, : text.length - late]

    def _take_next(self, tokens: torch.Tensor, rest: dict[str, Any], take: Take) -> torch.Tensor:
        """Returns take(self(tokens, **rest).logits) of [B, 1, V], calling the engine directly where
        that is the same.

        For a small model, the calls around the engine's step take as long as the step itself."""
        others = {k: v for k, v in rest.items() if k != CACHE}
        taken = self.decoder.step(self, tokens, rest[CACHE], others, take)
        return take(self(tokens, **rest, return_dict=True).logits) if taken is None else taken

    @staticmethod
    def create_masks_for_generate(
        attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor | None:
        """Returns the 2-D padding mask as it is: a recurrence needs no attention mask."""
        return attention_mask
