"""The command `flashcell serve`: one server, or with --ray replicas of it."""

import argparse
import logging
import time
from functools import partial

from ..command import (
    NEEDED,
    check_port,
    load_server,
    make_parser,
    need,
    read_key,
    run,
    serve,
    stop_at_signals,
)
from .cluster import add_options, check_options, import_ray, replicas


def parse_arguments(given: list[str]) -> argparse.Namespace:
    parser = make_parser()
    add_options(parser)
    arguments = parser.parse_args(given)
    check_options(parser, arguments)
    return arguments


def main(given: list[str]) -> None:
    """Runs the command with the words behind `serve`."""
    arguments = parse_arguments(given)
    if arguments.ray:
        serve_replicas(arguments)
    else:
        serve(arguments)


def serve_replicas(arguments: argparse.Namespace) -> None:
    """Starts replicas, and answers with them until the process is told to stop."""
    need("ray", f"{NEEDED}, ray[serve]", partial(import_ray, arguments))
    from ..door import allowed_hosts
    from ..metrics import Metrics
    from .front import Front, make_front

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    check_model(arguments)
    check_port(arguments)
    stop_at_signals()
    arguments.created = int(time.time())
    key, hosts = read_key(arguments), allowed_hosts(arguments.host, arguments.allow_host)
    # The key stays here, and a replica has as many threads as Ray reserves cores for it.
    changes = {"api_key_file": None, "threads": arguments.threads or 1}
    theirs = argparse.Namespace(**{**vars(arguments), **changes})
    with replicas(arguments, partial(load_server, theirs)) as handle:
        front = Front(
            handle, Metrics(), arguments.max_body_bytes, arguments.body_seconds, key, hosts
        )
        run(make_front(front), key, hosts, arguments)


def check_model(arguments: argparse.Namespace) -> None:
    """Ends the command if there is no such model, before all that takes long."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise SystemExit(f"flashcell serve: the model is {arguments.model}, but: {why}") from None
