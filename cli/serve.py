"""``outrider serve``: many requests at once over HTTP, for clients of OpenAI's API."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from outrider.cli import options
from outrider.engines.errors import OutriderError
from outrider.engines.open import PROVIDERS


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
    batch = Batch.load(bundle, lanes=max_batch, threads=threads, provider=provider, prefix_bytes=prefix_cache << 20)
    settings = Settings(name or bundle.resolve().name, api_key, max_body, timeout, log_prompts)
    log_as_json()
    app = create_app(Service(batch, max_waiting), settings)
    address, at = listening.getsockname()[:2]
    address = f"[{address}]" if ":" in address else address
    click.echo(
        f"serving {settings.model} at http://{address}:{at} ({max_batch} at once, rows {batch.exactness})", err=True
    )
    if not run(app, listening, timeout + 1):
        raise click.Abort


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise OutriderError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None
