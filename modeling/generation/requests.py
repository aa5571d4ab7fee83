"""The request of continuous batching, its completion, and its state while it runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .argument_checks import check_cuts, check_scores, first_unread, is_count, token_ids


class Logprobs(NamedTuple):
    """The logarithm of a token's probability, and the likeliest tokens with theirs.

    They are the model's own: before temperature, top_k, top_p and other processing."""

    token: float
    top: list[tuple[int, float]]


@dataclass
class Request:
    """One prompt, with the options for sampling and for its end.

    Args:
        prompt: token ids, a list or a tensor of one dimension.
        max_new_tokens: at least 1.
        eos_token_id: token or tokens that end the text, None for the model's generation_config's.
        do_sample: draw from the distribution, with a generator of this request's own.
        temperature, top_k, top_p: as in generate, in this order, each None for off.
        seed: of the generator; the same tokens as generate after torch.manual_seed(seed) on the CPU.
            None: another one every time.
        logits_processor: applied before all of these, as generate's: (ids [1, n], scores [1, V]).
        max_time: seconds from the moment the prompt begins to be read.
        on_token: called with every token as it comes, and with its Logprobs if `logprobs` is set.
        logprobs: how many of the likeliest tokens to give with each token, None for no Logprobs.
        past_key_values: the state after the first tokens of the prompt, a cache of one row: only
            the tokens behind these are read. It is not copied and must not be changed.
        keep_at: numbers of tokens of the prompt after which `on_state` is called.
        on_state: called there, and when the text has ended by itself, with the tokens read so far
            [n] and the state after them, a cache of one row.

    All other values are copied when the request is submitted or read, so a list or a tensor can be
    reused. Callbacks (`logits_processor`, `on_token`, `on_state`) run inside the step of the whole
    batch. The tensors they get are copies. They may submit and cancel requests, but not run the
    batch. A prompt with a state before it is read in other chunks than the whole prompt, so the
    scores are the same up to rounding.
    """

    prompt: Sequence[int] | torch.Tensor
    max_new_tokens: int = 20
    eos_token_id: int | Sequence[int] | None = None
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    logits_processor: LogitsProcessorList | None = None
    max_time: float | None = None
    on_token: Callable[..., Any] | None = None
    logprobs: int | None = None
    past_key_values: Any = None
    keep_at: Sequence[int] = ()
    on_state: Callable[[torch.Tensor, Any], Any] | None = None


@dataclass
class Completion:
    """The result of a request: its new tokens, and why it ended.

    `reason` is "stop" (an end token, which is the last of `tokens`), "length", "time", "cancelled"
    or "error", with the exception in `error`."""

    index: int  # the request's number in the order of submission
    tokens: list[int]  # new ones only
    reason: str
    error: BaseException | None = None
    logprobs: list[Logprobs] = field(default_factory=list)  # one a token, if the request asks so


@dataclass(eq=False)
class Running:
    """A request in progress: its checked prompt, its tokens so far, and its sampler."""

    index: int
    model: Any
    wrong: BaseException | None = None  # what is wrong with the request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    ended: bool = False

    def copy(self, request: Request, max_prompt_tokens: int | None) -> None:
        """Copies and checks `request`; the caller may change its values afterwards."""
        if not isinstance(request, Request):
            raise TypeError(f"request is a {type(request).__name__}, but must be a Request")
        self.request = replace(request, prompt=())
        self.prompt = token_ids("prompt", request.prompt)
        self._check(max_prompt_tokens)
        # how many tokens the state holds: of the prompt at first, then of the new ones too
        self.position = self.begins_at = first_unread(request.past_key_values, len(self.prompt))
        self.cuts = check_cuts(request.keep_at, self.begins_at, len(self.prompt))
        self.given_at = -1  # the position of the last on_state
        end = request.eos_token_id
        if end is None:
            end = self.model.generation_config.eos_token_id
        self.ends = set() if end is None else set(token_ids("eos_token_id", end).view(-1).tolist())
        self.own_processors = list(request.logits_processor or [])

    def begin(self) -> None:
        """Sets up the sampler and the clock, just before the prompt is read."""
        if self.wrong is not None:
            raise self.wrong
        request = self.request
        self.processors = LogitsProcessorList(self.own_processors)
        if request.do_sample:
            self.processors += _warpers(request)
            self.generator = torch.Generator(self.model.device)
            if request.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(request.seed)
        self.started = time.monotonic()

    def _check(self, max_prompt_tokens: int | None) -> None:
        prompt, vocabulary = self.prompt, self.model.config.vocab_size
        if prompt.dim() != 1 or not len(prompt):
            raise ValueError(f"prompt has shape {list(prompt.shape)}, but must be [n] with n >= 1")
        if max_prompt_tokens is not None and len(prompt) > max_prompt_tokens:
            raise ValueError(f"prompt has {len(prompt)} tokens, but may have {max_prompt_tokens}")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"prompt has token {low if low < 0 else high}, but must be in 0..{vocabulary - 1}"
            )
        most, likeliest = self.request.max_new_tokens, self.request.logprobs
        if not is_count(most):
            raise ValueError(f"max_new_tokens is {most!r}, but must be an integer of at least 1")
        if likeliest is not None and not (is_count(likeliest, 0) and likeliest <= vocabulary):
            had = f"logprobs is {likeliest!r:.60}"
            raise ValueError(f"{had}, but must be None or an integer in 0..{vocabulary}")
        limit = self.request.max_time
        if isinstance(limit, bool) or not isinstance(limit, int | float | None):
            raise TypeError(f"max_time is {limit!r}, but must be None or a number of seconds")
        seed = self.request.seed
        if seed is not None and not (is_count(seed, -(2**63)) and seed < 2**64):
            raise ValueError(f"seed is {seed!r:.60}, but must be None or an integer of 64 bits")
        processors = self.request.logits_processor
        if processors is not None and not isinstance(processors, Sequence):
            kind = type(processors).__name__
            raise TypeError(f"logits_processor is a {kind}, but must be None or a list of them")
        for name, function in (
            ("on_token", self.request.on_token),
            ("on_state", self.request.on_state),
            *(("logits_processor", function) for function in processors or ()),
        ):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is {function!r:.60}, but must be callable")

    @property
    def decides(self) -> bool:
        """Whether the next token is chosen by sampling or logits processors instead of argmax."""
        request = self.request
        return bool(self.processors) or request.do_sample or request.logprobs is not None

    @property
    def unread(self) -> int:
        """The number of tokens of the prompt that have not been read."""
        return max(len(self.prompt) - self.position, 0)

    def next_size(self, chunk: int) -> int:
        """Returns the size of the next prompt chunk; all chunks but the first before a cut are
        full."""
        cut = next(cut for cut in (*self.cuts, len(self.prompt)) if cut > self.position)
        return (cut - self.position - 1) % chunk + 1

    def read(self, size: int) -> torch.Tensor:
        start = self.position
        self.position += size
        return self.prompt[start : start + size]

    def give_state(self, take: Callable[[], Any]) -> None:
        """Calls `on_state` with the state that `take` copies, unless it has had this one."""
        if self.request.on_state is None or self.given_at == self.position:
            return
        self.given_at = self.position
        new = torch.tensor(self.tokens, dtype=torch.long, device="cpu")
        read = torch.cat([self.prompt, new])[: self.position]
        with torch.no_grad():  # as in take
            self.request.on_state(read, take())

    def take(self, token: int | None, scores: torch.Tensor | None) -> str | None:
        """Appends the argmax `token`, or one chosen from scores [1, V] if `decides`.

        Returns why this was the last token, or None."""
        if token is None:
            raise FloatingPointError("the logits are not finite")
        rest: tuple[Logprobs, ...] = ()
        if scores is not None:
            token = self._choose(scores.float().clone())
            if self.request.logprobs is not None:
                rest = (logprobs_of(token, scores[0], self.request.logprobs),)
        self.tokens.append(token)
        self.logprobs += rest
        if self.request.on_token is not None:
            try:
                self.request.on_token(token, *rest)
            finally:  # no_grad() around it would cost as much as the rest of this method
                if torch.is_grad_enabled():
                    torch.set_grad_enabled(False)
        if token in self.ends:
            return "stop"
        if len(self.tokens) >= self.request.max_new_tokens:
            return "length"
        limit = self.request.max_time
        return "time" if limit is not None and time.monotonic() - self.started > limit else None

    def _choose(self, scores: torch.Tensor) -> int:
        """Chooses a token from scores [1, V], a copy of this request's own."""
        if self.processors:
            text = [self.prompt, torch.tensor(self.tokens, dtype=torch.long, device="cpu")]
            ids = torch.cat(text)[None].to(scores.device)
            device, shape = scores.device, scores.shape
            with torch.no_grad():  # as in take
                scores = self.processors(ids, scores)
            check_scores(scores, shape, device)
        if not self.request.do_sample:
            return int(scores.argmax(-1))
        probabilities = scores.softmax(-1)
        if not probabilities.isfinite().all():  # multinomial would take the whole GPU down
            raise ValueError("logits_processor left a score that is infinite")
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


@dataclass(eq=False)
class Choice:
    """A pending asynchronous copy of the argmax tokens of several rows to the CPU."""

    rows: dict[int, Running]  # the requests that wait for the tokens
    scores: torch.Tensor  # [rows, V]
    best: torch.Tensor  # [rows]
    table: torch.Tensor  # [rows] on the CPU: best, NaN where its score is not finite
    event: Any  # ends the copy; None if there is none to wait for

    @classmethod
    def between(cls, rows: dict[int, Running], scores: torch.Tensor) -> "Choice":
        score, best = scores.max(-1)  # NaN is the greatest
        table, event = score.double().mul_(0).add_(best), None
        if table.is_cuda:
            host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
            table, event = host.copy_(table, non_blocking=True), torch.cuda.Event()
            event.record(torch.cuda.current_stream(scores.device))
        return cls(rows, scores, best, table, event)

    def read(self) -> list[int | None]:
        if self.event is not None:
            self.event.synchronize()
        return [None if token != token else int(token) for token in self.table.tolist()]


def _warpers(request: Request) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if request.temperature is not None:
        warpers.append(TemperatureLogitsWarper(request.temperature))
    if request.top_k is not None:
        warpers.append(TopKLogitsWarper(request.top_k))
    if request.top_p is not None:
        warpers.append(TopPLogitsWarper(request.top_p))
    return warpers


def logprobs_of(token: int, scores: torch.Tensor, likeliest: int) -> Logprobs:
    """Returns the Logprobs of a token from the model's scores [V]."""
    all_of_them = scores.float().log_softmax(-1)
    values, ids = all_of_them.topk(likeliest)
    return Logprobs(
        float(all_of_them[token]), list(zip(ids.tolist(), values.tolist(), strict=True))
    )
