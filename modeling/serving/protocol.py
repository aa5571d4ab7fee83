"""What clients may ask: the bodies of /v1/completions and /v1/chat/completions, checked.

A field that is not known, or asks for what this server cannot do, is an error and never ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..utils.encode import Encoder
from .errors import ApiError, wrong
from .fields import (
    Check,
    boolean,
    ignored,
    integer,
    number,
    only,
    parse,
    string,
    take,
)
from .messages import messages

MOST_CHOICES, MOST_PROMPTS, MOST_STOPS, MOST_BIASES = 128, 128, 4, 1024
SEED = integer(-(2**63), 2**63 - 1)


@dataclass
class Asked:
    """A checked request: prompts as token ids, and the options of all its choices."""

    prompts: list[list[int]]
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    ignore_eos: bool = False
    echo: bool = False
    chat: bool = False


@dataclass
class Limits:
    """What a request may have at most."""

    prompt_tokens: int = 32_768
    new_tokens: int = 4096
    body_bytes: int = 4 * 2**20


class Protocol:
    """Checks bodies for one model, whose tokenizer makes the prompts."""

    def __init__(
        self, names: set[str], tokenizer: Any, vocabulary: int, limits: Limits,
        chat_template: str | None = None,
    ):  # fmt: skip
        self.names, self.tokenizer, self.vocabulary = names, tokenizer, vocabulary
        self.encode = Encoder(tokenizer)
        self.limits, self.chat_template = limits, chat_template
        token = integer(0, vocabulary - 1)

        def biases(name: str, value: Any) -> dict[int, float]:
            if not isinstance(value, dict) or len(value) > MOST_BIASES:
                raise wrong(name, value, f"an object of at most {MOST_BIASES} tokens")
            bias = number(-100, 100)
            found = {}
            for key, amount in value.items():
                if not (key.isascii() and key.isdigit() and len(key) < 12):
                    raise wrong(name, key, "an object whose names are token ids")
                found[token(name, int(key))] = bias(f"{name}.{key}", amount)
            return found

        self.common: dict[str, Check] = {
            "model": self._model,
            "n": integer(1, MOST_CHOICES),
            "temperature": number(0, 2),
            "top_p": number(0, 1, above=True),
            "top_k": integer(1, vocabulary),
            "seed": SEED,
            "stop": stops,
            "stream": boolean,
            "stream_options": stream_options,
            "presence_penalty": number(-2, 2),
            "frequency_penalty": number(-2, 2),
            "logit_bias": biases,
            "max_tokens": integer(1, limits.new_tokens),
            "ignore_eos": boolean,
            "user": ignored(string(0, 512)),
        }
        self.completion: dict[str, Check] = {
            **self.common,
            "prompt": self._prompts,
            "logprobs": integer(0, 5),
            "echo": boolean,
            "best_of": integer(1, MOST_CHOICES),
            "suffix": only(""),
        }
        self.chat: dict[str, Check] = {
            **self.common,
            "messages": messages,
            "logprobs": boolean,
            "top_logprobs": integer(0, 20),
            "max_completion_tokens": self.common["max_tokens"],
            "response_format": only({"type": "text"}),
            "tools": only([]),
            "tool_choice": only("none", "auto"),
            "functions": only([]),
            "function_call": only("none", "auto"),
            "parallel_tool_calls": ignored(boolean),
            "modalities": only(["text"]),
            "audio": only(),
            "prediction": only(),
            "reasoning_effort": only(),
            "verbosity": only(),
            "web_search_options": only(),
            "store": only(False),
            "metadata": only({}),
            "service_tier": only("auto", "default"),
            "prompt_cache_key": ignored(string(0, 512)),
            "safety_identifier": ignored(string(0, 512)),
        }

    def read_completion(self, body: bytes) -> Asked:
        given = self._required(take(parse(body), self.completion), "model", "prompt")
        best_of = given.pop("best_of", None)
        if best_of is not None and best_of != given.get("n", 1):
            raise wrong("best_of", best_of, "left out or equal to n", "unsupported_parameter")
        if given.get("echo") and given.get("logprobs") is not None:
            raise wrong("echo", True, "false with logprobs", "unsupported_parameter")
        given.pop("suffix", None)
        return self._asked(given, given.pop("prompt"), 16)

    def read_chat(self, body: bytes) -> Asked:
        given = self._required(take(parse(body), self.chat), "model", "messages")
        most = given.pop("max_completion_tokens", None)
        if most is not None:
            if given.get("max_tokens", most) != most:
                raise wrong("max_tokens", given["max_tokens"], "equal to max_completion_tokens")
            given["max_tokens"] = most
        top = given.pop("top_logprobs", None)
        if top is not None and not given.get("logprobs"):
            raise wrong("top_logprobs", top, "left out unless logprobs is true")
        given["logprobs"] = (top or 0) if given.get("logprobs") else None
        prompt = self.chat_prompt(given.pop("messages"))
        kept = {name: given[name] for name in given if name in self.common or name == "logprobs"}
        return self._asked({**kept, "chat": True}, [prompt], self.limits.new_tokens)

    @property
    def can_chat(self) -> bool:
        template = self.chat_template or getattr(self.tokenizer, "chat_template", None)
        return template is not None

    def chat_prompt(self, said: list[dict[str, str]]) -> list[int]:
        """Returns the tokens of a conversation, by the model's chat template."""
        template = self.chat_template or getattr(self.tokenizer, "chat_template", None)
        if template is None:
            raise ApiError(
                400, "this model has no chat template: use /v1/completions, or start the server "
                "with --chat-template FILE", code="no_chat_template",
            )  # fmt: skip
        try:
            text = self.tokenizer.apply_chat_template(
                said, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # the template may refuse what it likes
            raise ApiError(
                400, f"the chat template refuses the messages: {error}", param="messages"
            ) from None
        return self._checked_length("messages", self.encode(text))

    def _asked(self, given: dict[str, Any], prompts: list[list[int]], new: int) -> Asked:
        given.pop("model")
        given.pop("user", None)
        options = given.pop("stream_options", None)
        if options is not None and not given.get("stream"):
            raise wrong("stream_options", options, "left out unless stream is true")
        usage = bool((options or {}).get("include_usage"))
        often = bool((options or {}).get("continuous_usage_stats"))
        new = given.pop("max_tokens", min(new, self.limits.new_tokens))
        return Asked(prompts, new, include_usage=usage, continuous_usage=often, **given)

    @staticmethod
    def _required(given: dict[str, Any], *names: str) -> dict[str, Any]:
        for name in names:
            if name not in given:
                raise ApiError(
                    400, f"{name} is missing", param=name, code="missing_required_parameter"
                )
        return given

    def _model(self, name: str, value: Any) -> str:
        value = string(1, 512)(name, value)
        if value not in self.names:
            known = " or ".join(sorted(self.names))
            raise ApiError(
                404, f"model is {value!r:.60}, but must be {known}", param=name,
                code="model_not_found",
            )  # fmt: skip
        return value

    def _prompts(self, name: str, value: Any) -> list[list[int]]:
        """Takes a text, texts, a list of token ids, or lists of them."""
        must = "a string, an array of strings, an array of token ids or an array of such arrays"
        if isinstance(value, str):
            return [self._tokens(name, value)]
        if not isinstance(value, list) or not value:
            raise wrong(name, value, must)
        if all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            return [self._ids(name, value)]
        if len(value) > MOST_PROMPTS:
            raise wrong(name, value, f"at most {MOST_PROMPTS} prompts, not {len(value)}")
        readers: dict[type, Callable[[str, Any], list[int]]] = {str: self._tokens, list: self._ids}
        kinds = {type(one) for one in value}
        if len(kinds) > 1 or not kinds <= readers.keys():
            raise wrong(name, value, must)
        return [readers[type(one)](f"{name}[{i}]", one) for i, one in enumerate(value)]

    def _tokens(self, name: str, text: str) -> list[int]:
        ids = self.tokenizer(string()(name, text), verbose=False)["input_ids"]
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        return self._checked_length(name, ids)

    def _ids(self, name: str, value: list[Any]) -> list[int]:
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < self.vocabulary:
                raise wrong(name, one, f"token ids, which are integers in 0..{self.vocabulary - 1}")
        return self._checked_length(name, value)

    def _checked_length(self, name: str, ids: list[int]) -> list[int]:
        if not ids:
            raise wrong(name, "", "at least one token")
        if len(ids) > self.limits.prompt_tokens:
            raise ApiError(
                400, f"{name} has {len(ids)} tokens, but may have {self.limits.prompt_tokens}",
                param=name, code="context_length_exceeded",
            )  # fmt: skip
        return ids


def stops(name: str, value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or len(given) > MOST_STOPS:
        raise wrong(name, value, f"a string or an array of at most {MOST_STOPS} strings")
    return [string(1, 256)(name, one) for one in given]


def stream_options(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    checks: dict[str, Check] = {
        "include_usage": boolean, "continuous_usage_stats": boolean,
        "include_obfuscation": only(False),
    }  # fmt: skip
    return take(value, checks, f"{name}.")
