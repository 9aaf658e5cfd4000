"""openinfer behind Ray Serve: `python examples/ray_serve/app.py MODEL --replicas 2:8 [-- FLAGS of openinfer serve]`.

Each replica starts a server of its own and passes requests on to it. An ingress takes the clients' requests; Ray's
prefix router sends those that begin alike to one replica. The command again, with other flags, updates the replicas one
after the other. README.md has the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

APP = "openinfer"
PATHS = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models",
    "/tokenize", "/detokenize", "/health",
}  # fmt: skip
"""Paths that any replica may answer. A command, such as sleep, would reach one replica only, so all are refused."""
ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
"""ray.serve.llm.request_router has it too, but imports only where vLLM or SGLang is installed."""
IMBALANCE = 8
"""A replica may have this many requests more than another before its prefixes are computed elsewhere."""
ATTEMPTS = 3
"""Replicas that are asked for one answer, as long as none of it has come."""
START_LIMIT_S = 1800
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Call:
    """A client's request. Ray's router compares `prompt`, which is never empty."""

    method: str
    path: str
    body: bytes
    prompt: str


class Replica:
    """A server in a process of its own. Each of the two ends with the other. Ray gives it its GPUs."""

    def __init__(self, command: list[str], drain_s: float) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        libc, port = ctypes.CDLL(None), self._url.rpartition(":")[2]
        self._drain_s = drain_s
        self._server = subprocess.Popen(
            [*command, "--port", port, "--shutdown-timeout", str(drain_s)],
            preexec_fn=lambda: libc.prctl(
                PR_SET_PDEATHSIG, signal.SIGTERM
            ),  # a killed replica leaves no server
        )
        self._session: aiohttp.ClientSession | None = None
        self._leaving = False
        threading.Thread(target=self._end_with_server, daemon=True).start()

    def _end_with_server(self) -> None:
        """Ray replaces this replica at once, where checks of its health would take seconds."""
        code = self._server.wait()
        if not self._leaving:
            print(f"the server ended with {code}; its log says why", file=sys.stderr, flush=True)
            os._exit(1)

    async def _client(self) -> aiohttp.ClientSession:
        """One client, made in the loop that uses it, once the server is ready."""
        if self._session is None:
            session = aiohttp.ClientSession(self._url, timeout=aiohttp.ClientTimeout(total=None))
            until = time.monotonic() + START_LIMIT_S
            while not await self._is_ready(session):
                if time.monotonic() > until:
                    raise RuntimeError(f"the server is not ready after {START_LIMIT_S} s; its log says why")
                await asyncio.sleep(0.1)
            self._session = session
        return self._session

    @staticmethod
    async def _is_ready(session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get("/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def reconfigure(self, _: Any) -> None:
        """Ray calls it once, and sends requests only when it has returned: the server is ready then."""
        await self._client()

    async def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        async with (await self._client()).get("/health") as answer:
            if answer.status != 200:
                raise RuntimeError(await answer.text())

    async def answer(self, call: Call) -> AsyncIterator[Any]:
        """Status and type of the answer, then its bytes as they come."""
        session, headers = await self._client(), {"Content-Type": "application/json"}
        async with session.request(call.method, call.path, data=call.body, headers=headers) as answer:
            yield answer.status, answer.content_type
            async for piece in answer.content.iter_any():
                yield piece

    def __del__(self) -> None:
        """Ray calls it when a replica leaves, after its requests have ended."""
        self._leaving = True
        self._server.terminate()
        self._server.wait(self._drain_s + 30)


class Ingress:
    """Takes the clients' requests."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """An answer of a replica. Where a replica dies before the answer has begun, another is asked."""
        if request.url.path not in PATHS:
            return _error(404, f"{request.url.path} is not served here; there are {', '.join(sorted(PATHS))}")
        body = await request.body()
        call = Call(request.method, request.url.path, body, _prompt(body) or request.url.path)
        for attempt in range(ATTEMPTS):
            pieces = self._replicas.answer.remote(call)
            try:
                status, kind = await anext(pieces)
            except (RayError, aiohttp.ClientError) as error:
                print(f"attempt {attempt + 1} of {ATTEMPTS}: {type(error).__name__}", file=sys.stderr)
                continue
            return StreamingResponse(pieces, status, media_type=kind)
        return _error(503, "the replicas that were asked have died; try again")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def _prompt(body: bytes) -> str:
    """The text by which requests are alike; "" for a request without text."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    text = (
        fields.get("messages") or fields.get("prompt") or fields.get("input")
        if isinstance(fields, dict)
        else None
    )
    return json.dumps(text) if text else ""


def application(args: argparse.Namespace) -> serve.Application:
    """The deployments of a command line."""
    least, most = args.replicas
    command = [*shlex.split(args.command), "serve", args.model, *args.flags]
    replicas = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        user_config={"command": command},  # `reconfigure` is called where there is one
        max_ongoing_requests=args.most_requests,
        autoscaling_config=AutoscalingConfig(
            min_replicas=least, max_replicas=most, target_ongoing_requests=args.requests
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs={"imbalanced_threshold": IMBALANCE, "do_eviction": True},
        ),
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=args.drain,
    )
    ingress = serve.deployment(
        Ingress, name="Ingress", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=4096
    )
    return ingress.bind(replicas.bind(command, args.drain))


def _pair(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    return int(least), int(most or least)


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help="folder of the checkpoint, on every host, or name of the hub")
    add("--replicas", type=_pair, default=(1, 1), metavar="N[:M]", help="at least N and at most M replicas")
    add("--gpus", type=float, default=0, help="GPUs of a replica; default: %(default)s, a CPU")
    add("--cpus", type=float, default=1, help="CPU cores that Ray counts for a replica; default: %(default)s")
    add("--requests", type=float, default=64, help="requests of a replica above which one is added")
    add("--most-requests", type=int, default=256, help="requests of a replica above which the ingress waits")
    add("--drain", type=float, default=60, help="seconds for the requests of a replica that leaves")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--command", default=f"{sys.executable} -m openinfer.cli", help="how a replica starts openinfer")
    own, _, flags = " ".join(map(shlex.quote, argv)).partition(" -- ")
    return parser.parse_args(shlex.split(own), argparse.Namespace(flags=shlex.split(flags)))


def main() -> None:
    args = parsed(sys.argv[1:])
    has_cluster = "RAY_ADDRESS" in os.environ
    ray.init(log_to_driver=not has_cluster)
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(application(args), name=APP, blocking=False)
    print(f"{APP}: serving on http://{args.host}:{args.port}", flush=True)
    if not has_cluster:  # the cluster lives as long as this process
        address = ray.get_runtime_context().gcs_address
        print(
            f"{APP}: with RAY_ADDRESS={address} and the same RAY_AUTH_TOKEN, this command updates it",
            flush=True,
        )
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
        serve.shutdown()


if __name__ == "__main__":
    main()
