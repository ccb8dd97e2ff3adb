"""The server as applications of Ray Serve, for more than one replica (``docs/scaling.md``).

Ray starts, checks, drains and replaces replicas, gives each request to one of them, and holds back those for which no
lane is free; a replica is ``create_app`` over a batch of its own.
"""
# Annotations are not postponed here: Ray reads the type of a builder's argument as it stands.

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import Metric
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from ray.serve.schema import LoggingConfig

from outrider.engines.heap import share_one_heap
from outrider.runtime.batch import Batch
from outrider.runtime.service import Service
from outrider.serve.app import Settings, create_app
from outrider.serve.log import log_as_json
from outrider.serve.metrics import CONTENT_TYPE, of_replicas

API_KEY = "OUTRIDER_API_KEY"  # of a replica's environment, since a configuration is shown to whoever asks Ray
APPLICATION = "outrider"
METRICS = "metrics"
DEPLOYMENT = "Replica"
LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)  # replicas log their requests themselves


class ReplicaOptions(BaseModel):
    """Args of ``build``: those of ``outrider serve``, for each replica.

    ``threads`` are also the processors that Ray sets aside for a replica; another ``provider`` than ``cpu`` gets a GPU
    too. With ``max_replicas`` above ``min_replicas`` their number follows the load: one for every ``max_batch``
    requests that run or wait.
    """

    model_config = ConfigDict(extra="forbid")
    bundle: str
    name: str | None = None
    threads: PositiveInt = 1
    max_batch: PositiveInt = 8
    max_waiting: int = Field(64, ge=0)
    prefix_cache: int = Field(256, ge=0)
    provider: str = "cpu"
    max_body: PositiveInt = 4 << 20
    timeout: PositiveFloat = 600.0
    log_prompts: bool = False
    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt = 1

    @model_validator(mode="after")
    def _consistent(self) -> "ReplicaOptions":
        if self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas is less than min_replicas")
        return self


class MetricsOptions(BaseModel):
    """Args of ``build_metrics``: the name of the application that ``build`` made."""

    model_config = ConfigDict(extra="forbid")
    application: str = APPLICATION


def build(options: ReplicaOptions) -> serve.Application:
    """Replicas of a bundle, for ``serve.run``, ``serve run`` and Ray's configuration files."""
    load = AutoscalingConfig(
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        target_ongoing_requests=options.max_batch,
    )
    fixed = options.min_replicas == options.max_replicas
    deployment = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        num_replicas=options.min_replicas if fixed else None,
        autoscaling_config=None if fixed else load,
        ray_actor_options={"num_cpus": options.threads, "num_gpus": int(options.provider != "cpu")},
        # What no lane is free for waits in front of all replicas, not behind one; so, to Ray, does what is on its way.
        max_ongoing_requests=options.max_batch,
        max_queued_requests=options.max_waiting + options.max_batch,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        graceful_shutdown_timeout_s=options.timeout,
        health_check_period_s=1,
        logging_config=LOGGING,
    )
    return deployment.bind(options)


def build_metrics(options: MetricsOptions) -> serve.Application:
    """``/metrics`` of all replicas. An application of its own, so that a scrape never waits for a lane."""
    deployment = serve.deployment(_Metrics, name="Metrics", ray_actor_options={"num_cpus": 0}, logging_config=LOGGING)
    return deployment.bind(options.application)


@serve.ingress()
class Replica:
    def __init__(self, options: ReplicaOptions) -> None:
        log_as_json()
        share_one_heap()
        batch = Batch.load(
            options.bundle,
            lanes=options.max_batch,
            threads=options.threads,
            provider=options.provider,
            prefix_bytes=options.prefix_cache << 20,
        )
        name = options.name or Path(options.bundle).resolve().name
        key = os.environ.get(API_KEY)
        settings = Settings(name, key, options.max_body, options.timeout, options.log_prompts)
        self._service = Service(batch, options.max_waiting)
        self._app = create_app(self._service, settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    def check_health(self) -> None:
        """Ray replaces a replica where this raises."""
        if self._service.failure is not None:
            raise self._service.failure

    def metrics(self) -> tuple[str, Sequence[Metric]]:
        """Under the name that Ray gives the replica."""
        return serve.get_replica_context().replica_tag, self._app.state.metrics.families()


class _Metrics:
    def __init__(self, application: str) -> None:
        self._application = application

    async def __call__(self, _: Request) -> Response:
        handle: Any = serve.get_deployment_handle(DEPLOYMENT, self._application)
        replies = await handle.broadcast("metrics").results_async(return_exceptions=True)
        alive = dict(reply for reply in replies if not isinstance(reply, BaseException))
        return Response(of_replicas(alive), media_type=CONTENT_TYPE)
