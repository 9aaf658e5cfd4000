"""How fast records go from one engine's host memory to another's: two processes on this host, without a GPU.

    python libs/kvpool/benchmarks/transfers.py [WAY ...] [--blocks 256] [--mb 2.36] [--json FILE]

WAY: shared, as engines of one host do; tcp and nixl, as engines of two hosts do. A load asks for all blocks of a
prompt, as a decode engine does. The time ends when they are in blocks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

from openinfer.kvpool import Group, Pool
from openinfer.kvpool.tiers import Sharing, Tiers, TransferConfig
from openinfer.tensor import Device, Stream, Tensor

CONNECTORS = {"shared": "TcpConnector", "tcp": "TcpConnector", "nixl": "NixlConnector"}
TOKENS = 16
"""Tokens of a block."""


class Engine:
    """A pool and its tiers, with the memory of a CPU. The host memory has room for two prompts."""

    def __init__(self, way: str, block_bytes: int, blocks: int) -> None:
        groups = (Group("pages", TOKENS, blocks + 2, block_bytes),)
        config = TransferConfig(
            CONNECTORS[way], kv_port=0, kv_connector_extra_config={"share_memory": way == "shared"}
        )
        self.sharing = Sharing(config, groups, {})
        self.tiers = Tiers(
            groups, 2 * (blocks + 2) * (block_bytes + 4096), sharing=self.sharing, load_timeout_s=60.0
        )
        self.pool = Pool(groups, loader=self.tiers, saver=self.tiers)
        device = Device("cpu")
        self.cache = Tensor.empty((blocks + 2, block_bytes), "uint8", device)
        self.cache.numpy()[:] = 1
        self.tiers.attach([[self.cache]], Stream(device))
        while self.tiers._host._thread is not None and self.tiers._host._thread.is_alive():
            time.sleep(0.01)


def serve(way: str, block_bytes: int, blocks: int, link: Any) -> None:
    """The engine that has the blocks, in a process of its own."""
    one = Engine(way, block_bytes, blocks)
    link.send(one.sharing.address)
    while (tokens := link.recv()) is not None:
        with one.pool.acquire(tokens) as lease:
            lease.reserve(len(tokens))
            for block in lease.block_table():
                one.cache.numpy()[block] = tokens[0] % 256
            lease.commit(tokens, len(tokens))
        one.sharing.export(str(tokens[0]), one.pool, one.tiers, tokens, b"", None)
        while not one.sharing.exported(str(tokens[0])):
            one.tiers.collect()
        one.pool.evict(blocks)
        link.send(str(tokens[0]))
    one.tiers.close()


def measure(way: str, block_bytes: int, blocks: int, repeats: int) -> dict[str, Any]:
    """GB/s of each repeat, with the blocks that came."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=serve, args=(way, block_bytes, blocks, theirs))
    child.start()
    one, rates = Engine(way, block_bytes, blocks), []
    try:
        address = ours.recv()
        for repeat in range(repeats):
            tokens = [repeat + 2] * (TOKENS * blocks + 1)
            ours.send(tokens)
            name, began = ours.recv(), time.perf_counter()
            one.sharing.peers.ask(repeat, one.pool.missing(tokens), address)
            while not one.sharing.peers.answers(0.1):
                pass
            with one.pool.acquire(tokens) as lease:
                if not lease.load():
                    raise RuntimeError("the peer had nothing")
                while lease not in one.pool.poll(0.1):
                    pass
                seconds = time.perf_counter() - began
                wrong = sum(int(one.cache.numpy()[b].max()) != tokens[0] for b in lease.block_table())
                if lease.num_cached < len(tokens) - 1 or wrong:
                    raise RuntimeError(f"{lease.num_cached} tokens came, and {wrong} blocks are wrong")
                rates.append(blocks * block_bytes / seconds / 1e9)
            one.sharing.peers.end(address, name)
            one.pool.evict(blocks)
    finally:
        ours.send(None)
        child.join(10)
        child.kill()
        one.tiers.close()
    return {"way": way, "block_bytes": block_bytes, "blocks": blocks, "gb_per_s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("ways", nargs="*", default=list(CONNECTORS))
    add("--blocks", type=int, default=256)
    add("--mb", type=float, default=2.359296)
    add("--repeats", type=int, default=4)
    add("--json", type=Path)
    args = parser.parse_args()
    found = [measure(way, int(args.mb * 1e6), args.blocks, args.repeats) for way in args.ways]
    for row in found:
        print(row["way"], *(f"{rate:.2f}" for rate in row["gb_per_s"]), "GB/s")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
