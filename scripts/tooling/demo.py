"""Builds, publishes, fetches and loads the kernels, then runs a model that writes Python.

    scripts/demo "def read_"         the first run makes its environment: minutes; later ones: seconds
    scripts/demo --hub "def read_"   kernels from huggingface.co as the committed lock pins them

Makes a Python environment (--here: uses the present one), builds the kernels (with g++ for the CPU,
with nvcc for a GPU that torch can use), publishes them to a Hub that listens on 127.0.0.1 only, fetches them back by their lock with every
digest verified, loads the checkpoint with AutoModelForCausalLM and streams a continuation of the
prompt. Everything it makes lies in the state folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tooling import arguments, environment

ROOT = environment.ROOT
MODULES = ["flashcell", "jinja2", "kernel_abi_check", "kernels", "torch", "transformers"]
MODEL = ROOT / "model_cards" / "flash-rnn-python-5m"


def parse_arguments() -> argparse.Namespace:
    summary, _, manual = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog="demo",
        description=summary,
        epilog=manual,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("prompt", nargs="?", default="def read_", help="what the model continues")
    add("--hub", action="store_true", help="kernels from huggingface.co: build and publish nothing")
    add(
        "--model",
        type=arguments.model,
        default=str(MODEL),
        help="folder or Hub name; default: the checkpoint",
    )
    add("--max-new-tokens", type=int, default=200)
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest token always")
    add("--seed", type=int, default=0)
    # One sequence of a small model: a second thread gains nothing (790 tokens/s with one), and on a
    # busy machine the two wait for each other (17 tokens/s).
    add("--threads", type=int, default=1, help="for generation; larger models want more")
    environment.add_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if not args.hub:
        environment.find_compiler()
    home = environment.enter(args, [], MODULES)
    os.environ["HF_HOME"] = str(home / "huggingface")
    os.environ["LOCAL_KERNELS"] = ""  # no build of this checkout: kernels come from the Hub
    hub = None if args.hub else serve_kernels(home)
    generate(args, hub)
    if hub:
        hub.stop()


def serve_kernels(home: Path):
    """Builds the kernels, publishes them to a local Hub, and points the loader at its lock."""
    from tooling.local_hub import LocalHub

    run("build_kernels", "--home", home, what="the kernels could not be built")
    hub = LocalHub(home / "hub").start()
    lock, published = home / "kernels_lock.py", home / "published.json"
    os.environ |= {"FLASHCELL_LOCK": str(lock), "HF_ENDPOINT": hub.url}
    builds = fingerprint()
    if not (lock.exists() and published.exists() and published.read_text() == builds):
        published.unlink(missing_ok=True)
        options = ["--endpoint", hub.url, "--lock", lock, "--replace"]
        run("publish_kernels", *options, what="the kernels could not be published")
        published.write_text(builds)
    return hub


def fingerprint() -> str:
    """Hashes the metadata of all built variants, which holds the digest of every file."""
    found = sorted((ROOT / "kernel_builds").glob("*/build/*/metadata.json"))
    names = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in found}
    return json.dumps(names, indent=2)


def run(script: str, *arguments: object, what: str) -> None:
    command = [sys.executable, ROOT / "scripts" / script, *arguments]
    if subprocess.run([str(word) for word in command]).returncode:
        environment.fail(f"{what} (see above)")


def origin(hub) -> str:
    """Returns where the kernel's files came from in this run."""
    if hub is None:
        return "from huggingface.co or its cache"
    fetched = any("/resolve/" in line and ".so" in line for line in hub.requests)
    return f"fetched from {hub.url}" if fetched else f"cached, published on {hub.url}"


def generate(args: argparse.Namespace, hub) -> None:
    """Generates text, on the GPU if torch has one, else on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, logging

    import flashcell  # noqa: F401  registers the models
    from flashcell.hub.kernel_loader import KernelError, kernel_info

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        info = kernel_info("fused-rnn", device, device)  # an error without this kernel
    except KernelError as error:
        environment.fail(str(error))
    print(f"kernel  {info.repo}@{info.revision[:12]}, {origin(hub)}, every digest as locked")
    print(f"        {info.path}")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval().to(device)
    model.config.backend = device
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"model   {Path(args.model).name}, {size:.1f} M parameters\n", flush=True)

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)
    length = inputs["input_ids"].shape[1]
    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": 0.95}
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    started = time.monotonic()
    limit = {"max_new_tokens": args.max_new_tokens}
    output = model.generate(**inputs, **sampling, **limit, streamer=streamer)
    seconds = time.monotonic() - started
    count = output.shape[1] - length
    print(f"\n{count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens/s")
    place = f"{args.threads} CPU thread(s)" if device == "cpu" else torch.cuda.get_device_name()
    print(f"{place}, kernel from the {info.source}: {info.variant}")


if __name__ == "__main__":
    main()
