"""The command `flashcell serve MODEL`: OpenAI's HTTP API for a recurrent language model.

It listens on this machine alone unless --host says otherwise. The key comes from the environment
variable FLASHCELL_API_KEY or from a file, so that no list of processes shows it.
"""

import argparse
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

MIB = 2**20
NEEDED = "fastapi, uvicorn, httptools, jinja2, prometheus_client"


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the options of one server."""
    summary, _, manual = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="flashcell serve", description=summary, epilog=manual,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("model", help="a folder or a name on the Hub")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=count(0, 65535), default=8000, help="0 for any that is free")
    add("--allow-host", action="append", default=[], metavar="NAME",
        help="a name that clients may call this server by")  # fmt: skip
    add("--name", help="the model's name for clients; None: its folder's name")
    add("--api-key-file", type=file, help="file with the key that clients must send")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch's name")
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights; auto: the checkpoint's",
    )
    add("--threads", type=count(1), help="threads of torch on a CPU; None: torch's choice")
    add("--slots", type=count(1), default=32, help="sequences decoded together")
    add("--prefill-rows", type=count(1), help="prompts read together; None: 16 on CUDA, else 8")
    add("--prefill-chunk", type=count(2), help="tokens of each in a call; None: 256 on CUDA or 64")
    add("--interval-ms", type=number(0), default=25.0,
        help="milliseconds between two sendings of a stream's tokens, at least")  # fmt: skip
    add("--queue", type=count(0), default=1024, help="choices that may wait; more get status 429")
    add("--max-prompt-tokens", type=count(1), default=32_768, help="longer prompts are refused")
    add("--max-new-tokens", type=count(1), default=4096, help="most that a request may ask for")
    add("--max-body-bytes", type=count(1), default=4 * MIB, help="of a request")
    add("--max-connections", type=count(1), default=2048, help="at a time; more are refused")
    add("--body-seconds", type=number(0.001), default=30.0, help="for a request's body to arrive")
    add("--head-seconds", type=number(0.001), default=25.0, help="for a request's head to arrive")
    add("--stalled-seconds", type=number(0.001), default=120.0,
        help="without reading, after which a client is given up")  # fmt: skip
    add("--chat-template", type=file, help="Jinja file, for a tokenizer without one")
    add("--state-device-mib", type=count(0), default=1024, help="GPU memory for states")
    add("--state-host-mib", type=count(0), default=1024, help="host memory for states")
    add("--state-folder", type=Path, help="keeps states on disk too, for the next start")
    add("--state-folder-mib", type=count(1), default=4096, help="disk space for states")
    add("--prefix-state", type=file, action="append", default=[], metavar="FILE",
        help="a state saved with input_ids: prompts that begin with these start there")  # fmt: skip
    add("--shutdown-seconds", type=count(1),
        help="for running requests to finish after SIGTERM; None: no limit")  # fmt: skip
    return parser


def file(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def count(least: int, most: int | None = None) -> Any:
    def read(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            limit = f"at least {least}" if most is None else f"in {least}..{most}"
            raise argparse.ArgumentTypeError(f"it is {value}, but must be {limit}")
        return value

    read.__name__ = "integer"  # argparse shows this name in its errors
    return read


def number(least: float) -> Any:
    def read(text: str) -> float:
        value = float(text)
        if not least <= value < math.inf:  # nan is not
            raise argparse.ArgumentTypeError(
                f"it is {text}, but must be a finite number of at least {least:g}"
            )
        return value

    read.__name__ = "number"  # as above
    return read


class ModelError(ValueError):
    """Why a model cannot be loaded."""


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    except (OSError, ValueError, SafetensorError) as error:
        why = str(error).partition("\n")[0]
        raise ModelError(f"the model is {arguments.model}, but: {why}") from error
    try:
        return model.to(arguments.device).eval(), tokenizer
    except (
        AssertionError,
        RuntimeError,
    ) as error:  # torch is built without CUDA, or has no such GPU
        why = str(error).partition("\n")[0]
        raise ModelError(f"--device is {arguments.device}, but: {why}") from error


def make_states(model: Any, arguments: argparse.Namespace) -> Any:
    """Returns the PrefixStates, with the files of --prefix-state; None if there is no memory for
    them."""
    from ..state.disk_states import StateFolder
    from ..state.prefix_states import PrefixStates, model_identity
    from ..state.rows import state_shapes
    from ..state.serialization import read_state

    if not arguments.state_device_mib and not arguments.state_host_mib:
        return None
    config, folder, identity = model.config, None, os.urandom(32)
    shapes = state_shapes(model)
    if arguments.state_folder is not None:
        identity = model_identity(model)
        budget = arguments.state_folder_mib * MIB
        folder = StateFolder(arguments.state_folder, identity, config, shapes, budget)
    budgets = arguments.state_device_mib * MIB, arguments.state_host_mib * MIB
    states = PrefixStates(identity, config, model.device, *budgets, folder)
    for file in arguments.prefix_state:
        state, ids = read_state(config, file, shapes, model.device)
        if ids is None:
            raise SystemExit(
                f"flashcell serve: --prefix-state {file} has no token ids, but must: save it with "
                "model.save_state(cache, path, input_ids=ids)"
            )
        states.keep(torch.tensor(ids, device="cpu"), state, pinned=True)
    return states


def make_server(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> Any:
    """Returns the Server of app.py around a model."""
    from ..generation.batching import Batcher
    from .app import Server
    from .door import allowed_hosts
    from .engine import Engine
    from .metrics import Metrics
    from .protocol import Limits, Protocol
    from .text import TokenBytes

    limits = Limits(arguments.max_prompt_tokens, arguments.max_new_tokens, arguments.max_body_bytes)
    name = arguments.name or Path(arguments.model).name
    template = arguments.chat_template and arguments.chat_template.read_text()
    vocabulary = min(model.config.vocab_size, max(len(tokenizer), 1))
    protocol = Protocol({name, arguments.model}, tokenizer, vocabulary, limits, template)
    sizes = arguments.slots, arguments.prefill_rows, arguments.prefill_chunk
    batcher, metrics = Batcher(model, *sizes), Metrics()
    most = arguments.slots + len(batcher.batch.prefill_rows) + arguments.queue
    engine = Engine(batcher, most, arguments.interval_ms / 1e3, metrics.step.observe)
    states = make_states(model, arguments)
    metrics.watch(engine, states)

    decode = make_decode(tokenizer)
    return Server(
        name, protocol, engine, metrics, decode, TokenBytes(tokenizer, decode), states,
        read_key(arguments), allowed_hosts(arguments.host, arguments.allow_host),
        arguments.body_seconds,
    )  # fmt: skip


def load_server(arguments: argparse.Namespace) -> Any:
    """Returns the Server around the model that the arguments name."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    return make_server(*load(arguments), arguments)


def make_decode(tokenizer: Any) -> Any:
    """Returns the function from token ids to text, without special tokens; it remembers the text of
    single tokens."""
    backend, known = getattr(tokenizer, "backend_tokenizer", None), dict[int, str]()

    def decode(ids: list[int]) -> str:
        if len(ids) == 1 and ids[0] in known:
            return known[ids[0]]
        if backend is not None:
            text = backend.decode(ids, skip_special_tokens=True)
        else:
            text = tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        if len(ids) == 1:
            known[ids[0]] = text
        return text

    return decode


def read_key(arguments: argparse.Namespace) -> str | None:
    if arguments.api_key_file is not None:
        key = arguments.api_key_file.read_text().strip()
        if not key:
            raise SystemExit(
                f"flashcell serve: {arguments.api_key_file} is empty, but must be a key"
            )
        return key
    return os.environ.get("FLASHCELL_API_KEY") or None


def need(extra: str, needed: str = NEEDED, others: Callable[[], Any] | None = None) -> None:
    """Ends the command if packages of an extra are missing; `others` imports more of them."""
    try:
        from . import app, connections  # noqa: F401

        if others is not None:
            others()
    except ImportError as error:
        raise SystemExit(
            f"flashcell serve: {error.name} is not installed, but the server needs {needed}: "
            f'pip install "flashcell[{extra}]"'
        ) from None


def serve(arguments: argparse.Namespace) -> None:
    """Answers with one model in this process, until it is told to stop."""
    need("serve")
    from .app import make_app

    check_port(arguments)
    try:
        server = load_server(arguments)
    except ModelError as error:
        raise SystemExit(f"flashcell serve: {error}") from None
    run(make_app(server), server.key, server.hosts, arguments)


def check_port(arguments: argparse.Namespace) -> None:
    """Ends the command if it cannot listen on the port."""
    host, port = arguments.host, arguments.port
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise SystemExit(f"flashcell serve: cannot listen on {host} port {port}: {why}") from None


def run(app: Any, key: str | None, hosts: set[str] | None, arguments: argparse.Namespace) -> None:
    """Listens, and answers until the process is told to stop."""
    import uvicorn

    from .connections import limited
    from .engine import SWITCH_SECONDS

    if hosts is None and key is None:
        logging.warning("anyone who reaches %s may use this server: it has no key", arguments.host)
    sys.setswitchinterval(SWITCH_SECONDS)
    connection = limited(
        MOST=arguments.max_connections, HEAD_SECONDS=arguments.head_seconds,
        STALLED_SECONDS=arguments.stalled_seconds,
    )  # fmt: skip
    config = uvicorn.Config(
        app, arguments.host, arguments.port, http=connection, ws="none",
        access_log=False, server_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=arguments.shutdown_seconds, lifespan="on",
    )  # fmt: skip
    stop_at_signals()  # uvicorn sends the signal again when all has ended
    uvicorn.Server(config).run()


def stop_at_signals() -> None:
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
