"""`lockstep serve`."""

from typing import Annotated

import typer

from lockstep.base import plugins
from lockstep.cli._common import Base, DType, Trained, TrustCode, console

LONGEST = 86_400
"""Largest number of seconds of an option: a day. Timers of the event loop do not take infinity."""
PACKAGES = ("fastapi", "fastapi_offline", "httptools", "python_multipart", "prometheus_client", "uvicorn")
"""Packages of the extra `serve`."""


def command(
    target: Trained,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)] = 8000,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    dtype: DType = None,
    max_batch: Annotated[int, typer.Option(help="Most inputs predicted together.", min=1)] = 32,
    max_wait_ms: Annotated[
        float, typer.Option(help="How long the first of a batch waits for others.", min=0, max=60_000)
    ] = 0,
    queue: Annotated[int, typer.Option(help="Inputs that may wait; beyond: 503.", min=1)] = 1024,
    timeout: Annotated[float, typer.Option(help="Seconds for a request; beyond: 504.", min=0.1, max=LONGEST)] = 30,
    max_body_mb: Annotated[float, typer.Option(help="Size of a request; beyond: 413.", min=0.001, max=1 << 20)] = 8,
    drain: Annotated[
        float, typer.Option(help="Seconds to finish accepted requests after SIGTERM.", min=0, max=LONGEST)
    ] = 20,
    api_key: Annotated[
        str | None, typer.Option(help="Required as Authorization: Bearer KEY.", envvar="LOCKSTEP_API_KEY")
    ] = None,
    base: Base = None,
    trust_code: TrustCode = False,
) -> None:
    """Answer POST /predict, or POST /generate with a language model, and show a page to try it on.

    SIGHUP, or POST /-/reload from this machine, reloads it; SIGTERM and Ctrl-C finish accepted requests, then exit.
    """
    plugins.require("serve", *PACKAGES, what="lockstep serve")
    from lockstep.inference import trained_model
    from lockstep.inference.serving import server
    from lockstep.inference.serving.service import Settings

    settings = Settings(
        host=host,
        port=port,
        max_batch=max_batch,
        max_wait_seconds=max_wait_ms / 1000,
        queue=queue,
        timeout_seconds=timeout,
        body_bytes=round(max_body_mb * 2**20),
        drain_seconds=drain,
        api_key=api_key,
    )
    trained_model.authorize(target, (), trusts=trust_code)
    load = trained_model.loader(target, device=device, dtype=dtype, base=base)
    server.serve(load, settings, lambda line: console.print(line, soft_wrap=True))
