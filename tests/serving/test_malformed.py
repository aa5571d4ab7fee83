"""Tests that every malformed request gets a 4xx in OpenAI's form, and the server goes on."""

import json

import httpx
import pytest

from served import NAME

GOOD = {"model": NAME, "prompt": "def f", "max_tokens": 2}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def body(**changes) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def chat(**changes) -> bytes:
    return json.dumps({**CHAT, **changes}).encode()


def said(content, role="user", **more) -> bytes:
    return chat(messages=[{"role": role, "content": content, **more}])


BODIES = {  # what the message must say: (body, status) of a completion
    "is not JSON": (b"{", 400),
    "is not JSON: Expecting value at character 0": (b"", 400),
    "is not JSON: Extra data": (b"{} {}", 400),
    "is null, but must be a JSON object": (b"null", 400),
    "is [], but must be a JSON object": (b"[]", 400),
    'is "text", but must be': (b'"text"', 400),
    "is not UTF-8: invalid start byte at byte 11": (b'{"prompt": "\xff"}'[:11] + b"\xff", 400),
    "is not UTF-8": (json.dumps(GOOD).encode("utf-16"), 400),
    "is nested too deeply": (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", 400),
    "nested too deeply": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
    'has "zz" twice': (
        b"{" + b"".join(b'"%x": 0, ' % n for n in range(100_000)) + b'"zz": 0, "zz": 0}', 400,
    ),
    'has "prompt" twice': (b'{"prompt": "a", "prompt": "b"}', 400),
    "has NaN, which is not JSON": (b'{"temperature": NaN}', 400),
    "has -Infinity": (b'{"temperature": -Infinity}', 400),
    "has a number of 5000 characters": (b'{"seed": ' + b"9" * 5000 + b"}", 400),
    "is 9999999999999999999999": (body(seed=9999999999999999999999), 400),
    'unknown field "\\ud800"': (body(**{"\ud800": 2}), 400),
    "model is missing": (b'{"prompt": "x"}', 400),
    "prompt is missing": (json.dumps({"model": NAME}).encode(), 400),
    "model is 'other', but must be": (body(model="other"), 404),
    "model is 5, but must be a string": (body(model=5), 400),
    "model is missing ": (body(model=None), 400),
    "prompt is 5, but must be": (body(prompt=5), 400),
    "prompt is true, but must be": (body(prompt=True), 400),
    "prompt is {}, but must be": (body(prompt={}), 400),
    "prompt is [], but must be": (body(prompt=[]), 400),
    'prompt is ["a", 1], but must be': (body(prompt=["a", 1]), 400),
    "prompt is [1.5], but must be": (body(prompt=[1.5]), 400),
    "prompt is [true], but must be": (body(prompt=[True]), 400),
    "prompt is [null]": (body(prompt=[None]), 400),
    "prompt is -1, but must be token ids": (body(prompt=[3, -1]), 400),
    "prompt is 3072, but must be token ids": (body(prompt=[3072]), 400),
    "prompt[1] is 9007199254740993": (body(prompt=[[1], [9007199254740993]]), 400),
    'prompt[0] is "", but must be at least one token': (body(prompt=[[]]), 400),
    "at most 128 prompts": (body(prompt=["a"] * 129), 400),
    "but must be Unicode": (b'{"model": "m", "prompt": "\\ud800"}'.replace(b'"m"', f'"{NAME}"'.encode()), 400),
    "prompt has 32769 tokens, but may have 32768": (body(prompt=[1] * 32769), 400),
    "max_tokens is 0": (body(max_tokens=0), 400),
    "max_tokens is -1": (body(max_tokens=-1), 400),
    "max_tokens is 1.5, but must be an integer": (body(max_tokens=1.5), 400),
    "max_tokens is true": (body(max_tokens=True), 400),
    'max_tokens is "5"': (body(max_tokens="5"), 400),
    "max_tokens is 4097, but must be an integer in 1..4096": (body(max_tokens=4097), 400),
    "temperature is -0.1": (body(temperature=-0.1), 400),
    "temperature is 2.1": (body(temperature=2.1), 400),
    'temperature is "hot"': (body(temperature="hot"), 400),
    "temperature is true": (body(temperature=True), 400),
    "temperature is [], but": (body(temperature=[]), 400),
    "temperature is Infinity": (b'{"temperature": 1e999}', 400),
    "top_p is 0.0, but must be a number above 0": (body(top_p=0.0), 400),
    "top_p is 1.5": (body(top_p=1.5), 400),
    "top_k is 0": (body(top_k=0), 400),
    "n is 0": (body(n=0), 400),
    "n is 129": (body(n=129), 400),
    "seed is 1.5": (body(seed=1.5), 400),
    "stop is 5": (body(stop=5), 400),
    'stop is ["a", "b", "c", "d", "e"], but must be a string or an array of at most 4':
        (body(stop=list("abcde")), 400),
    'stop is "", but must be a string of 1 to 256': (body(stop=[""]), 400),
    "stop is null, but must be a string": (body(stop=[None]), 400),
    "stream is 1, but must be true or false": (body(stream=1), 400),
    "stream_options is {}, but must be left out unless": (body(stream_options={}), 400),
    "stream_options is 5, but must be an object": (body(stream=True, stream_options=5), 400),
    'unknown field "stream_options.x"': (body(stream=True, stream_options={"x": 1}), 400),
    "stream_options.include_usage is 1": (body(stream=True, stream_options={"include_usage": 1}), 400),
    "presence_penalty is 3": (body(presence_penalty=3), 400),
    "frequency_penalty is -3": (body(frequency_penalty=-3), 400),
    "logit_bias is []": (body(logit_bias=[]), 400),
    'logit_bias is "x", but must be an object whose names': (body(logit_bias={"x": 1}), 400),
    "logit_bias is 5000, but must be an integer in 0..3071": (body(logit_bias={"5000": 1}), 400),
    "logit_bias.5 is 101": (body(logit_bias={"5": 101}), 400),
    "logprobs is 6": (body(logprobs=6), 400),
    "logprobs is true": (body(logprobs=True), 400),
    "echo is true, but must be false with logprobs": (body(echo=True, logprobs=1), 400),
    "best_of is 2": (body(best_of=2), 400),
    "suffix is not supported": (body(suffix="x"), 400),
    'unknown field "prompts"': (body(prompts="x"), 400),
    'unknown field "__class__"': (body(__class__="x"), 400),
    "ignore_eos is 1": (body(ignore_eos=1), 400),
}  # fmt: skip
CHATS = {
    "messages is missing": (json.dumps({"model": NAME}).encode(), 400),
    "messages is [], but must be an array of 1 to": (chat(messages=[]), 400),
    "messages is {}": (chat(messages={}), 400),
    'messages[0] is "x", but must be an object': (chat(messages=["x"]), 400),
    'messages[0].role is "tool", but must be one of': (said("x", role="tool"), 400),
    "messages[0].role is null": (chat(messages=[{"content": "x"}]), 400),
    "messages[0].content is null": (said(None), 400),
    "messages[0].content is 5": (said(5), 400),
    "messages[0].content is []": (said([]), 400),
    'but must be a part of type \\"text\\"': (said([{"type": "image_url", "image_url": {}}]), 400),
    "messages[0].content[0].text is null": (said([{"type": "text"}]), 400),
    'unknown field "messages[0].content[0].x"': (said([{"type": "text", "text": "", "x": 1}]), 400),
    'unknown field "messages[0].x"': (said("x", x=1), 400),
    "messages[0].tool_calls is not supported": (said("x", tool_calls=[{}]), 400),
    "tools is not supported": (chat(tools=[{"type": "function"}]), 400),
    "response_format is not supported": (chat(response_format={"type": "json_object"}), 400),
    "top_logprobs is 2, but must be left out unless logprobs": (chat(top_logprobs=2), 400),
    "top_logprobs is 21": (chat(logprobs=True, top_logprobs=21), 400),
    "logprobs is 1, but must be true or false": (chat(logprobs=1), 400),
    "max_tokens is 2, but must be equal to max_completion_tokens": (chat(max_completion_tokens=3), 400),
    "store is not supported": (chat(store=True), 400),
    "audio is not supported": (chat(audio={}), 400),
    'unknown field "prompt"': (chat(prompt="x"), 400),
}  # fmt: skip
assert len(BODIES) + len(CHATS) >= 60


def check(answer: httpx.Response, status: int, message: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    if message is not None:
        assert message.strip().replace('\\"', '"') in error["message"].replace('\\"', '"')
    assert len(error["message"]) < 400


def send(served, path: str, content: bytes, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json", **headers}
    return httpx.post(served.url + path, content=content, headers=headers, timeout=30)


@pytest.mark.parametrize("message", BODIES)
def test_completions(served, message):
    content, status = BODIES[message]
    check(send(served, "/v1/completions", content), status, message)


@pytest.mark.parametrize("message", CHATS)
def test_chats(served, message):
    content, status = CHATS[message]
    check(send(served, "/v1/chat/completions", content), status, message)


def test_values_that_are_nearly_nested_too_deeply(served):
    """Python reads them, and does not write them again."""
    for depth in range(900, 1000, 3):
        content = b'{"model": "%s", "stop": ' % NAME.encode() + b"[" * depth + b"]" * depth + b"}"
        check(send(served, "/v1/completions", content), 400)


def test_requests_that_are_not_the_api_s(served):
    good = body()
    check(send(served, "/v1/completions", good, **{"content-type": "text/plain"}), 415)
    check(send(served, "/v1/completions", good, **{"content-type": ""}), 415)
    check(send(served, "/v1/completions", good, **{"content-encoding": "gzip"}), 415)
    check(send(served, "/v1/completions", b" " * 5_000_000), 413, "the body has 5000000 bytes")
    parts = (b" " * 100_000 for _ in range(50))  # sent in chunks, without a length
    check(send(served, "/v1/completions", parts), 413, "more than")
    check(send(served, "/v1/completions", good, host="evil.example"), 421, "evil.example")
    check(send(served, "/v1/embeddings", good), 404)
    check(httpx.get(f"{served.url}/v1/completions"), 405)
    check(httpx.get(f"{served.url}/docs"), 404)
    check(httpx.get(f"{served.url}/v1/models/../../etc/passwd"), 404)
    check(httpx.get(f"{served.url}/v1/models/%2e%2e%2fetc%2fpasswd"), 404)
    check(httpx.request("DELETE", f"{served.url}/v1/models"), 405)
    assert served.text("def read_")


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
RAW = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    "no version": b"GET /\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "length and chunks": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "length of letters": HEAD + b"content-length: five\r\n\r\n",
    "negative length": HEAD + b"content-length: -5\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil\r\n\r\n",
    "chunk of no number": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "control character": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n",
    "space before a colon": b"GET /health HTTP/1.1\r\nhost : localhost\r\n\r\n",
    "large head": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    "long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("what", RAW)
def test_bytes_that_are_not_http(served, what):
    got = served.raw(RAW[what])
    assert got.startswith(b"HTTP/1.1 4"), got[:200]
    head, _, content = got.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}


def test_a_head_without_an_end(served):
    """It is refused at the bound, without keeping all of it."""
    before = served.memory()
    with served.connect() as connection:
        connection.settimeout(10)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
        sent = refused = 0
        try:
            while sent < 50 * 2**20:
                connection.sendall(b"a" * 65536)
                sent += 65536
        except (ConnectionResetError, BrokenPipeError):
            refused = sent
    assert sent == refused
    assert sent < 8 * 2**20
    assert served.memory() < before + 16 * 2**20


def test_requests_in_one_packet(served):
    """Pipelined requests are answered in order."""
    get = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = get.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n").replace(b"/v1/models", b"/x")
    got = served.raw(get * 20 + last)
    assert got.count(b"HTTP/1.1 200 OK") == 20
    assert got.count(b"HTTP/1.1 404 Not Found") == 1
