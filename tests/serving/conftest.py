"""Fixtures: a server of the shipped checkpoint, the same model here, and OpenAI's client."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

import flashcell
from served import FOLDER, Served

pytest.importorskip("fastapi", reason='the server needs pip install "flashcell[serve]"')


@pytest.fixture(scope="session")
def kernels(request) -> dict[str, str]:
    """The variable by which a model finds the kernel, as a developer's does."""
    if "LOCAL_KERNELS" in os.environ:
        return {}
    built = Path(request.getfixturevalue("fused_rnn").__file__).parent
    return {"LOCAL_KERNELS": f"flashcell/fused-rnn={built}"}


@pytest.fixture(autouse=True)
def found_here(kernels, monkeypatch):
    """Sets it for each test of this folder, and for no other."""
    for name, value in kernels.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def served(kernels, tmp_path_factory):
    """A server for all tests that leave it as it was."""
    one = Served(tmp_path_factory.mktemp("served"), "--slots", 8, "--queue", 600, **kernels)
    yield one
    assert one.stop() == 0, one.log()


@pytest.fixture
def start(kernels, tmp_path):
    """Starts servers of a test's own."""
    started = []

    def run(*options: object, **variables: str) -> Served:
        folder = tmp_path / f"server{len(started)}"
        folder.mkdir()
        started.append(Served(folder, *options, **{**kernels, **variables}))
        return started[-1]

    yield run
    for one in started:
        if one.process.poll() is None:
            one.kill()


@pytest.fixture(scope="session")
def model():
    return flashcell.FlashRNNForCausalLM.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def client(served):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture
def alone(model, tokenizer):
    """Returns the text and the tokens that model.generate gives a prompt, or the parts of a
    chat."""

    def run(prompt, new: int = 12, seed: int | None = None, **options) -> tuple[str, list[int]]:
        chat = not isinstance(prompt, str)  # a template says itself what special tokens there are
        text = "".join(prompt) if chat else prompt
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
        if seed is not None:
            torch.manual_seed(seed)
        out = model.generate(
            ids, max_new_tokens=new, do_sample=seed is not None, pad_token_id=0,
            **({} if seed is None else {"top_k": 0}), **options,
        )  # fmt: skip
        tokens = out[0, ids.shape[1] :].tolist()
        return tokenizer.decode(tokens, skip_special_tokens=True), tokens

    return run
