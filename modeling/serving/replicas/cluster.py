"""Replicas in Ray Serve: starts Ray or joins one, deploys the replicas, takes all away at the end.

A Ray of its own is reached from this machine alone, by those who know a key made for it, and keeps
its files in a folder that goes with it. It ends when this process ends, however that ends.
"""

import argparse
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..command import count, number

SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0"}  # Ray would tell its makers
# Without the first Ray listens on all addresses of the machine, whatever address it is given.
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # 15 without it: any other program would go before the replicas
}  # fmt: skip
APPLICATION, DEPLOYMENT = "flashcell", "model"  # their names in Ray Serve
FOLDER = "flashcell-ray"  # the beginning of the name of a folder for Ray's files
ROUTER = "flashcell.serving.replicas.router.PrefixRouter"
HEALTH_SECONDS = 1.0  # between two looks at a replica: one that has ended is replaced then
BACKOFF_SECONDS = 0.1  # at most between two looks for a replica that is not full
STORE_BYTES = 128 * 2**20  # of Ray's object store, which nothing here needs
DAY = 86_400.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of --ray to the command's."""
    add = parser.add_argument_group("replicas (pip install 'flashcell[ray]')").add_argument
    add("--ray", action="store_true",
        help="runs replicas of the model in Ray Serve; the limits above are each replica's")  # fmt: skip
    add("--ray-address", metavar="ADDRESS",
        help="of a Ray cluster to join, or auto; None: a Ray on this machine alone")  # fmt: skip
    add("--replicas", type=count(1), help="a fixed number; 1 if none of these three is given")
    add("--min-replicas", type=count(1), help="the least number; there are more under load")
    add("--max-replicas", type=count(1), help="the largest number")
    add("--replica-requests", type=count(1),
        help="that run or wait for each replica: above this number replicas are added, below it "
        "they are removed; None: --slots")  # fmt: skip
    add("--upscale-seconds", type=number(0), default=10.0, help="of load before replicas are added")
    add(
        "--downscale-seconds",
        type=number(0),
        default=300.0,
        help="of less load before replicas are removed",
    )
    add("--replica-gpus", type=number(0), help="GPUs of a replica, or a part of one; 1 with cuda")


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the command if options of --ray do not fit together."""
    names = "ray_address", "replicas", "min_replicas", "max_replicas", "replica_requests"
    given = [name for name in (*names, "replica_gpus") if getattr(arguments, name) is not None]
    least, most = arguments.min_replicas, arguments.max_replicas
    if given and not arguments.ray:
        parser.error(f"--{given[0].replace('_', '-')} is given, but needs --ray")
    if arguments.replicas is not None and (least or most):
        parser.error("--replicas is given, but must not be with --min-replicas or --max-replicas")
    if least and not most:
        parser.error("--min-replicas is given, but needs --max-replicas")
    if most and most < (least or 1):
        parser.error(f"--max-replicas is {most}, but must be at least --min-replicas, {least}")


def most_replicas(arguments: argparse.Namespace) -> int:
    return arguments.max_replicas or arguments.replicas or 1


def resources(arguments: argparse.Namespace) -> dict[str, float]:
    """Returns what Ray reserves for a replica."""
    gpus = arguments.replica_gpus
    if gpus is None:
        gpus = float(arguments.device.startswith("cuda"))
    return {"num_cpus": arguments.threads or 1, "num_gpus": gpus}


def import_ray(arguments: argparse.Namespace) -> None:
    """Imports Ray Serve, behind the environment variables that it reads then."""
    os.environ.update(SETTINGS)
    if arguments.ray_address is None:
        os.environ.update(OWN, RAY_AUTH_TOKEN=secrets.token_hex(32))
    from ray import serve  # noqa: F401


@contextmanager
def replicas(arguments: argparse.Namespace, make: Callable[[], Any]) -> Iterator[Any]:
    """Starts the replicas, and gives the handle by which requests reach them.

    `make` returns the Server of app.py that a replica runs."""
    import ray
    from ray import serve

    own = arguments.ray_address is None
    folder = make_folder() if own else None
    try:
        connect(arguments, folder)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        try:
            try:
                handle = serve.run(deployment(arguments, make), name=APPLICATION, route_prefix=None)
            except RuntimeError as error:
                raise SystemExit(f"flashcell serve: the replicas do not start: {error}") from None
            yield handle
        finally:
            serve.delete(APPLICATION)  # the replicas write what waits to be written
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def make_folder() -> str:
    """Makes the folder of a Ray of our own; removes those whose process was killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}-*-*"):
        with suppress(ValueError, OSError):
            if left.stat().st_uid == os.getuid() and not is_running(int(left.name.split("-")[2])):
                shutil.rmtree(left, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{FOLDER}-{os.getpid()}-")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def connect(arguments: argparse.Namespace, folder: str | None) -> None:
    """Starts Ray on this machine, with its files in `folder`, or joins the Ray at an address."""
    import ray

    quiet: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": True}
    if folder is None:
        try:
            ray.init(arguments.ray_address, **quiet)
        except (ConnectionError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise SystemExit(
                f"flashcell serve: --ray-address is {arguments.ray_address}, but: {why}"
            ) from None
        return
    needed, most = resources(arguments), most_replicas(arguments)
    ray.init(
        "local", include_dashboard=False, object_store_memory=STORE_BYTES, _temp_dir=folder,
        num_cpus=max(os.cpu_count() or 1, int(needed["num_cpus"]) * most), **quiet,
    )  # fmt: skip
    gpus = ray.cluster_resources().get("GPU", 0)
    if needed["num_gpus"] * most > gpus:
        raise SystemExit(
            f"flashcell serve: {most} replicas need {needed['num_gpus'] * most:g} GPUs, but there "
            f"are {gpus:g}: see --replicas and --replica-gpus"
        )


def deployment(arguments: argparse.Namespace, make: Callable[[], Any]) -> Any:
    """Returns what Ray Serve shall run: replica.py, as often as the options say."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from .replica import Replica

    slots, many = arguments.slots, dict[str, Any]()
    if arguments.max_replicas:
        many["num_replicas"] = "auto"
        many["autoscaling_config"] = AutoscalingConfig(
            min_replicas=arguments.min_replicas or 1,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=arguments.replica_requests or slots,
            upscale_delay_s=arguments.upscale_seconds,
            downscale_delay_s=arguments.downscale_seconds,
            metrics_interval_s=1.0,
            look_back_period_s=max(2.0, min(30.0, arguments.upscale_seconds)),
        )
    else:
        many["num_replicas"] = arguments.replicas or 1
    return (
        serve.deployment(Replica)
        .options(
            name=DEPLOYMENT,
            # as many again wait in the replica, which begins one in the step after another's last
            max_ongoing_requests=2 * slots,
            max_queued_requests=max(arguments.queue, 1),
            ray_actor_options=resources(arguments),
            health_check_period_s=HEALTH_SECONDS,
            health_check_timeout_s=30.0,
            graceful_shutdown_timeout_s=arguments.shutdown_seconds or DAY,
            graceful_shutdown_wait_loop_s=0.1,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            request_router_config=RequestRouterConfig(
                request_router_class=ROUTER,
                request_router_kwargs={"slots": slots},
                max_backoff_s=BACKOFF_SECONDS,
            ),
            **many,
        )
        .bind(make, arguments.created, arguments.ray_address is None)
    )
