"""Short requests a second over kept connections, and whether memory grows with their number.

    python libs/frontend/benchmarks/requests.py [--connections 16] [--requests 5000] [--rounds 5]

Each request is a prompt of 20 ids and 3 tokens out; every other one is streamed. The engine is a FakeEngine in its own
process, the clients are a third. Prints a line a round: the resident memory must settle.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from pathlib import Path

CLIENT = """
import asyncio, json, sys
port, connections, requests = map(int, sys.argv[1:4])
async def one(seed):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for i in range(requests // connections):
        stream = i % 2 == 0
        body = json.dumps({"prompt": [(i * 7 + seed) % 900 + 1] * 20, "max_tokens": 3, "stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n"
        writer.write(head % len(body) + body)
        if stream:
            await reader.readuntil(b"0\\r\\n\\r\\n")
        else:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\\r")[0]))
    writer.close()
async def main():
    await asyncio.gather(*[one(seed) for seed in range(connections)])
asyncio.run(main())
"""


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


async def run(args: argparse.Namespace) -> None:
    from openinfer.frontend import EngineSpec
    from openinfer.frontend.http import Tokenizer, create_app, run_server
    from openinfer.frontend.process_driver import ProcessDriver

    driver = ProcessDriver(EngineSpec("openinfer.frontend.testing:FakeEngine"))
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
    for _ in range(args.rounds):
        began, used = time.perf_counter(), time.process_time()
        command = [sys.executable, "-c", CLIENT, str(port), str(args.connections), str(args.requests)]
        await (await asyncio.create_subprocess_exec(*command)).wait()
        result = {
            "requests_per_s": round(args.requests / (time.perf_counter() - began)),
            "server_cpu_us_per_request": round((time.process_time() - used) / args.requests * 1e6),
            "resident_kib": resident_kib(),
        }
        print(json.dumps(result), flush=True)
    stop.set()
    await server
    await driver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=4800)
    parser.add_argument("--rounds", type=int, default=5)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
