"""Tests the endpoints by OpenAI's own client, unmodified: each answer is generate's."""

import asyncio
import time

import openai
import pytest

from served import NAME

SAMPLED = {"temperature": 0.8, "top_p": 0.9}


def ask(client, prompt="def read_", **options):
    asked = {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}
    return client.completions.create(**asked)


def gather(stream) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the text and the reason of each choice of a stream."""
    texts, reasons = {}, {}
    for chunk in stream:
        for choice in chunk.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason is not None:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons


def test_models(client):
    assert [one.id for one in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 5])
def test_completions(client, alone, stream, seed):
    options = {} if seed is None else {"seed": seed, **SAMPLED}
    want, _ = alone("def read_", 40, seed, **({} if seed is None else SAMPLED))
    answer = ask(client, max_tokens=40, stream=stream, **options)
    if stream:
        assert gather(answer) == ({0: want}, {0: "length"})
    else:
        assert answer.choices[0].text == want
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 40
        assert answer.usage.total_tokens == 40 + answer.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_chat(client, alone, stream, seed):
    messages = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "def f("},
    ]
    prompt = [*(f"# {m['role']}\n{m['content']}\n" for m in messages), "# assistant\n"]
    want, tokens = alone(prompt, 20, seed)
    reason = "stop" if tokens[-1] == 0 else "length"  # the end token
    options = {"temperature": 0} if seed is None else {"seed": seed}
    answer = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=20, stream=stream, **options
    )
    if stream:
        chunks = list(answer)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert gather(chunks) == ({0: want}, {0: reason})
    else:
        assert answer.choices[0].message.content == want
        assert answer.choices[0].finish_reason == reason
        assert answer.choices[0].message.role == "assistant"


def test_prompts_of_every_kind(client, alone, tokenizer):
    texts = ["import ", "class Test"]
    want = [alone(text)[0] for text in texts]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for prompt in (texts, ids):
        assert [choice.text for choice in ask(client, prompt).choices] == want
    assert ask(client, ids[1]).choices[0].text == want[1]
    assert ask(client, "import ", echo=True).choices[0].text == "import " + want[0]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_seeds_of_their_own(client, alone, stream):
    want = [alone("def read_", 12, 7 + i, **SAMPLED)[0] for i in range(3)]
    answer = ask(client, ["def read_", "def read_"], n=3, seed=7, stream=stream, **SAMPLED)
    texts = gather(answer)[0] if stream else {c.index: c.text for c in answer.choices}
    assert texts == dict(enumerate([*want, *want]))


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, alone, served, stream):
    whole, tokens = alone("def read_", 60)
    for stop in (["\n    "], [whole[9:14], "never"], ["no such text"], whole[20]):
        at = min((whole.find(s) for s in stop if s in whole), default=-1)
        answer = ask(client, max_tokens=60, stop=stop, stream=stream)
        texts = gather(answer) if stream else None
        text, reason = (
            (texts[0][0], texts[1][0])
            if stream
            else (answer.choices[0].text, answer.choices[0].finish_reason)
        )
        assert text == (whole if at < 0 else whole[:at])
        assert reason == ("length" if at < 0 else "stop")
        if not stream and at >= 0:
            assert answer.usage.completion_tokens < len(tokens)
    served.wait_idle()


def test_the_end_token_stops(client, alone, tokenizer):
    _, tokens = alone("def read_", 30)
    assert tokenizer.eos_token_id not in tokens
    bias = {str(tokenizer.eos_token_id): 100}
    answer = ask(client, max_tokens=30, logit_bias=bias)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    going = ask(client, max_tokens=30, logit_bias=bias, extra_body={"ignore_eos": True})
    assert going.choices[0].finish_reason == "length"
    assert going.usage.completion_tokens == 30


def test_penalties(client, alone):
    _, tokens = alone("x = [0, 0, 0, ", 40)
    options = {"frequency_penalty": 2, "presence_penalty": 2, "logprobs": 0, "max_tokens": 40}
    free = ask(client, "x = [0, 0, 0, ", **options).choices[0].logprobs.tokens
    assert len(set(tokens)) < 35 < len(set(free))


def test_logprobs(client, alone, tokenizer):
    want, tokens = alone("def read_", 12)
    plain = ask(client, logprobs=3).choices[0].logprobs
    assert plain.tokens == [tokenizer.decode([token]) for token in tokens]
    assert [max(top.values()) for top in plain.top_logprobs] == plain.token_logprobs  # greedy
    assert [len(top) for top in plain.top_logprobs] == [3] * 12
    assert "".join(plain.tokens) == want
    assert plain.text_offset == [sum(map(len, plain.tokens[:i])) for i in range(12)]
    came = [
        c.choices[0].logprobs for c in ask(client, logprobs=3, stream=True) if c.choices[0].text
    ]
    assert [t for one in came for t in one.tokens] == plain.tokens
    assert [t for one in came for t in one.token_logprobs] == plain.token_logprobs
    assert [t for one in came for t in one.text_offset] == plain.text_offset
    chat = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "x"}], max_tokens=5, temperature=0,
        logprobs=True, top_logprobs=2,
    )  # fmt: skip
    for one in chat.choices[0].logprobs.content:
        assert one.logprob == one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
        assert bytes(one.bytes).decode() == one.token == one.top_logprobs[0].token


def test_logprobs_of_parts_of_characters(client, tokenizer):
    """The bytes of é, one token each, are themselves, and the token that was drawn is among the top."""
    first, second = tokenizer.convert_tokens_to_ids(["Ã", "©"])
    for token, byte in ((first, 0xC3), (second, 0xA9)):
        bias, shown = {str(token): 100}, f"\\x{byte:02x}"
        asked = {"logit_bias": bias, "max_tokens": 2, "temperature": 0}
        chat = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "x"}], logprobs=True, **asked
        )
        for one in chat.choices[0].logprobs.content:
            assert (one.token, one.bytes) == (shown, [byte])
        for number in (0, 2):
            found = ask(client, logprobs=number, **asked).choices[0].logprobs
            assert found.tokens == [f"bytes:{shown}"] * 2
            for top, logprob in zip(found.top_logprobs, found.token_logprobs, strict=True):
                assert len(top) == number + 1 or number
                assert top[f"bytes:{shown}"] == logprob
            assert found.text_offset == [0, 1 if byte == 0xC3 else 0]  # characters begin at 0xc3


def test_usage_of_streams(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert not any(chunk.usage for chunk in ask(client, stream=True))
    often = {"continuous_usage_stats": True}
    counts = [c.usage.completion_tokens for c in ask(client, stream=True, stream_options=often)]
    assert sorted(counts) == counts
    assert counts[-1] == 12


def test_a_queue_that_is_full(start):
    one = start("--slots", 1, "--prefill-rows", 1, "--queue", 1)
    with openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0) as client:
        streams = [ask(client, max_tokens=2000, stream=True,
                       extra_body={"ignore_eos": True}) for _ in range(3)]  # fmt: skip
        with pytest.raises(openai.RateLimitError, match="at most 3 may") as error:
            ask(client)
        assert error.value.code == "queue_full"
        assert error.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="there are 4 choices, but may be 3"):
            ask(client, n=4)
        for stream in streams:
            stream.close()
        one.wait_idle()
        assert ask(client).choices[0].text


def test_the_key(start):
    one = start(FLASHCELL_API_KEY="secret")
    for key, good in (("secret", True), ("secre", False), ("secret2", False), ("ß", False)):
        if key.isascii():
            with openai.OpenAI(base_url=f"{one.url}/v1", api_key=key, max_retries=0) as client:
                if good:
                    assert client.models.list().data
                    continue
                with pytest.raises(openai.AuthenticationError, match="missing or wrong") as error:
                    client.models.list()
                assert error.value.code == "invalid_api_key"
    for path, status in (("/", 200), ("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
        sent = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        assert one.raw(sent.encode()).startswith(f"HTTP/1.1 {status} ".encode())


async def many(served, alone, requests: int) -> None:
    """Runs requests at once, every fourth of them streamed; each gets what generate gives."""
    prompts = ["def read_", "import ", "class Test", "for i in "]
    wanted = {(p, s): alone(p, 24, s, **SAMPLED)[0] for p in prompts for s in range(4)}

    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=600
    ) as client:

        async def one(i: int) -> bool:
            prompt, seed = prompts[i % 4], i // 4 % 4
            asked = {"model": NAME, "prompt": prompt, "max_tokens": 24, "seed": seed, **SAMPLED}
            if i % 8 < 2:
                stream = await client.completions.create(stream=True, **asked)
                text = "".join([c.choices[0].text async for c in stream])
            else:
                text = (await client.completions.create(**asked)).choices[0].text
            return text == wanted[prompt, seed]

        same = await asyncio.gather(*(one(i) for i in range(requests)))
    assert sum(same) == requests


def test_requests_at_once(served, alone):
    asyncio.run(many(served, alone, 64))
    served.wait_idle()


@pytest.mark.slow
def test_five_hundred_at_once(served, alone):
    """No request is lost, and memory is flat from the second time on."""
    asyncio.run(many(served, alone, 500))
    before, began = served.memory(), time.monotonic()
    for _ in range(3):
        asyncio.run(many(served, alone, 500))
    served.wait_idle()
    assert served.memory() < before + 64 * 2**20, time.monotonic() - began
