"""``outrider serve``: many requests at once over HTTP, for clients of OpenAI's API."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cli import options
from outrider.engines.bundle import Bundle
from outrider.engines.errors import OutriderError
from outrider.engines.heap import share_one_heap
from outrider.engines.open import PROVIDERS

if TYPE_CHECKING:
    from outrider.serve.app import Settings

# Ray reads these as it is imported and as it starts. It tells its makers nothing, takes orders from nobody without this
# user's token, and leaves no lines of the log out because they look alike.
_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_DEDUP_LOGS": "0"}


def _replicas(value: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX``, the type of an option."""
    try:
        bounds = [int(part) for part in value.split(":")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not 1 <= bounds[0] <= bounds[-1]:
        raise click.BadParameter(f"{value!r} is no whole number from 1 on, and no two such as 1:4")
    return bounds[0], bounds[-1]


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--api-key", envvar="OUTRIDER_API_KEY", help="What clients must send.  [default: $OUTRIDER_API_KEY]")
@click.option("--name", help="What clients call the model.  [default: the bundle's folder]")
@click.option("--max-batch", type=click.IntRange(min=1), default=8, show_default=True, help="Requests at once.")
@click.option("--max-waiting", type=click.IntRange(min=0), default=64, show_default=True, help="Requests that queue.")
@click.option("--prefix-cache", type=click.IntRange(min=0), default=256, show_default=True, help="MiB for old texts.")
@click.option("--max-body", type=click.IntRange(min=1), default=4 << 20, show_default=True, help="Bytes of a body.")
@click.option("--timeout", type=click.IntRange(min=1), default=600, show_default=True, help="Seconds a request.")
@click.option("--log-prompts", is_flag=True, help="Write prompts to the log too.")
@click.option(
    "--provider", type=click.Choice(PROVIDERS), default="cpu", show_default=True, help="What runs the models."
)
@click.option("--replicas", type=_replicas, metavar="N|MIN:MAX", help="Copies behind Ray Serve; MIN:MAX by load.")
@options.threads
def serve(
    bundle: Path,
    host: str,
    port: int,
    api_key: str | None,
    name: str | None,
    max_batch: int,
    max_waiting: int,
    prefix_cache: int,
    max_body: int,
    timeout: int,
    log_prompts: bool,
    provider: str,
    replicas: tuple[int, int] | None,
    threads: int | None,
) -> None:
    """Serve BUNDLE to clients of OpenAI's API, and a page to chat with it."""
    with options.extras("serve"):
        from outrider.runtime.batch import Batch
        from outrider.runtime.service import Service
        from outrider.serve.app import Settings, create_app
        from outrider.serve.log import log_as_json
        from outrider.serve.server import run

    listening = _listen(host, port)  # before the bundle is loaded: a port in use is known at once
    settings = Settings(name or bundle.resolve().name, api_key, max_body, timeout, log_prompts)
    if replicas is not None:
        batches = {
            "max_batch": max_batch,
            "max_waiting": max_waiting,
            "prefix_cache": prefix_cache,
            "provider": provider,
        }
        _serve_replicas(listening, Bundle(bundle), settings, replicas, threads, batches)
        return
    share_one_heap()
    batch = Batch.load(bundle, lanes=max_batch, threads=threads, provider=provider, prefix_bytes=prefix_cache << 20)
    log_as_json()
    service = Service(batch, max_waiting)
    how = f"{max_batch} at once, rows {batch.exactness}"
    if max_batch > 1 and batch.exactness != "bitwise":
        how += ": a text may depend on the other requests; --max-batch 1 keeps to single runs"
    _say(listening.getsockname(), settings, how)
    try:
        whole = run(create_app(service, settings), listening, timeout + 1)
    finally:
        service.close()  # its passes must not run on into the end of the process
    if not whole:
        raise click.Abort


def _serve_replicas(
    listening: socket.socket,
    bundle: Bundle,
    settings: Settings,
    replicas: tuple[int, int],
    threads: int | None,
    batches: dict[str, Any],
) -> None:
    for variable, value in _RAY.items():
        os.environ.setdefault(variable, value)
    with options.extras("ray"):
        from outrider.serve.ray_app import API_KEY, ReplicaOptions
        from outrider.serve.ray_local import run
    if settings.api_key is not None:
        os.environ[API_KEY] = settings.api_key
    least, most = replicas
    replica = ReplicaOptions(
        bundle=str(bundle.folder.resolve()),
        name=settings.model,
        threads=threads or max(1, (os.cpu_count() or 1) // most),
        max_body=settings.max_body,
        timeout=settings.timeout,
        log_prompts=settings.log_prompts,
        min_replicas=least,
        max_replicas=most,
        **batches,
    )
    address = listening.getsockname()
    listening.close()  # Ray listens there itself
    count = least if least == most else f"{least} to {most}"
    how = f"replicas: {count}, {replica.max_batch} at once in each"
    run(replica, address[0], address[1], lambda: _say(address, settings, how))


def _say(address: tuple[Any, ...], settings: Settings, how: str) -> None:
    host, port = address[:2]
    host = f"[{host}]" if ":" in host else host
    click.echo(f"serving {settings.model} at http://{host}:{port} ({how})", err=True)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise OutriderError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None
