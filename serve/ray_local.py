"""Replicas on this machine, in a Ray of their own that ends with the process."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from outrider.engines.errors import OutriderError
from outrider.serve.ray_app import APPLICATION, LOGGING, METRICS, MetricsOptions, ReplicaOptions, build, build_metrics

_OBJECT_STORE = 80 << 20  # bytes of shared memory, about Ray's least: requests and answers are small
_POLL_SECONDS = 0.1


def run(options: ReplicaOptions, host: str, port: int, ready: Callable[[], Any]) -> None:
    """Serve until SIGINT or SIGTERM; what runs then is answered first, and nothing else is taken. Another one ends it.

    Args:
        ready: called when all replicas answer.

    Raises:
        OutriderError: the replicas did not start.
    """
    stop = threading.Event()

    def end(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    ray.init(
        address="local",
        num_cpus=options.threads * options.max_replicas,
        object_store_memory=_OBJECT_STORE,
        include_dashboard=False,
        logging_level=logging.WARNING,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        _deploy(options, host, port)
        for number in (signal.SIGINT, signal.SIGTERM):  # in place of Ray's handlers, which end what runs
            signal.signal(number, end)
        ready()
        stop.wait()
        _drain()
    finally:
        ray.shutdown()


def _deploy(options: ReplicaOptions, host: str, port: int) -> None:
    listen = {"host": host, "port": port}
    serve.start(proxy_location="HeadOnly", http_options=listen, logging_config=LOGGING.model_dump())
    applications = [
        serve.RunTarget(build(options), APPLICATION, "/"),
        serve.RunTarget(build_metrics(MetricsOptions()), METRICS, "/metrics"),
    ]
    try:
        serve.run_many(applications)
    except RuntimeError as error:
        raise OutriderError(f"the replicas did not start, for what is written above: {error}") from None


def _drain() -> None:
    """Ray takes nothing more for what is deleted, and ends what then takes longer than requests may."""
    serve.delete(APPLICATION, _blocking=False)
    while APPLICATION in serve.status().applications:
        time.sleep(_POLL_SECONDS)
