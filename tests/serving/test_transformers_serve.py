"""Tests `transformers serve` with a model of ours: completions and chats are generate's."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from commands import environment
from served import FOLDER, TEMPLATE

pytest.importorskip("openai", reason="transformers serve needs it")


@pytest.fixture(scope="module")
def url(kernels, tmp_path_factory):
    """A server of transformers', which has loaded the shipped checkpoint with a chat template."""
    from socket import create_server

    folder = tmp_path_factory.mktemp("transformers")
    shutil.copytree(FOLDER, folder / "model")
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).with_name("transformers"), "serve", folder / "model",
        "--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", port,
    ]  # fmt: skip
    variables = {**kernels, "HF_HOME": str(folder), "HF_MODULES_CACHE": str(folder / "modules")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=log, env=environment(**variables)
        )
    deadline = time.monotonic() + 120
    while "running on http" not in (said := (folder / "log").read_text()):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}", str(folder / "model")
    process.kill()
    process.wait()


def test_completions(url, alone):
    want, _ = alone("def read_", 20)
    asked = {"model": url[1], "prompt": "def read_", "max_tokens": 20, "temperature": 0}
    answer = httpx.post(f"{url[0]}/v1/completions", json=asked, timeout=60)
    assert answer.json()["choices"][0]["text"] == want


def test_streams_and_chats_by_openais_client(url, alone):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url[0]}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model=url[1], prompt="def read_", max_tokens=20, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == alone("def read_", 20)[0]
        chat = client.chat.completions.create(
            model=url[1], messages=[{"role": "user", "content": "def f("}], max_tokens=20,
            temperature=0,
        )  # fmt: skip
    want, _ = alone(["# user\ndef f(\n", "# assistant\n"], 20)
    assert chat.choices[0].message.content == want
