"""How many tokens a second one frontend process streams: 256 clients, a fake engine in its own process.

    python libs/frontend/benchmarks/stream.py [--clients 256] [--tokens 400] [--step-ms 5]

The engine gives every client a token each --step-ms (0: as fast as it can). Clients run in a third process and read
raw sockets, so that the figure is the server's: its processor time per token is printed beside the rate.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CLIENT = """
import asyncio, sys, time, json
port, clients, tokens = map(int, sys.argv[1:4])
body = json.dumps({"prompt": [300], "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
head = f"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n".encode()
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + body)
    chunks, tail = 0, b""
    while not tail.endswith(b"0\\r\\n\\r\\n"):
        data = await reader.read(1 << 16)
        chunks += data.count(b"data: {")
        tail = (tail + data)[-8:]
    writer.close()
    return chunks
async def main():
    began = time.perf_counter()
    chunks = sum(await asyncio.gather(*[one() for _ in range(clients)]))
    print(json.dumps({"seconds": time.perf_counter() - began, "chunks": chunks}))
asyncio.run(main())
"""


async def serve(args: argparse.Namespace) -> dict[str, float]:
    import socket

    from openinfer.frontend import EngineSpec
    from openinfer.frontend.http import Tokenizer, create_app, run_server
    from openinfer.frontend.process_driver import ProcessDriver

    kwargs = {"max_running": args.clients, "max_waiting": 10**6, "step_delay_s": args.step_ms / 1000}
    driver = ProcessDriver(EngineSpec("openinfer.frontend.testing:FakeEngine", kwargs))
    await driver.start()
    tokenizer = Tokenizer.load(Path(__file__).parent.parent / "tests" / "data", 1024)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    stop, ready = asyncio.Event(), asyncio.Event()
    app = create_app(driver, tokenizer=tokenizer)
    server = asyncio.create_task(
        run_server(app, listener, shutdown_timeout_s=0, on_ready=ready.set, stop=stop)
    )
    await ready.wait()
    command = [sys.executable, "-c", CLIENT, str(port), str(args.clients), str(args.tokens)]
    before = time.process_time()
    client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await client.communicate()
    used = time.process_time() - before
    stop.set()
    await server
    await driver.close()
    result = json.loads(out)
    tokens = args.clients * args.tokens
    return {
        "clients": args.clients,
        "tokens": tokens,
        "tokens_per_s": round(tokens / result["seconds"]),
        "server_cpu_us_per_token": round(used / tokens * 1e6, 2),
        "tokens_per_s_of_one_core": round(tokens / used),
        "tokens_per_event": round(tokens / result["chunks"], 2),
        "cores": os.cpu_count() or 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=5.0)
    print(json.dumps(asyncio.run(serve(parser.parse_args()))))


if __name__ == "__main__":
    main()
