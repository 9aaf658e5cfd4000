"""The process of a rank above 0: `python -m openinfer.recipes.engine.follower_process`, told what to do on stdin.

It loads its part of the weights, records the same steps as rank 0, and then does what rank 0 says. It ends with rank 0,
however that ends: the kernel sends SIGKILL when the thread that started it is gone.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from openinfer.frontend import heap
from openinfer.frontend.errors import is_users_error, one_line
from openinfer.frontend.logs import set_up_logging
from openinfer.graph.runner import Ring, RingReader, follow_leader
from openinfer.recipes.engine import startup
from openinfer.recipes.engine.followers import NoFollowers
from openinfer.recipes.engine.ranks import Ranks
from openinfer.recipes.engine.recipe import named

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
SPIN_S = {"cuda": 0.1, "cpu": 0.001}
"""How long a follower looks for the next message before it sleeps. CPU ranks need their cores for the steps."""

log = logging.getLogger("openinfer.engine")


def main() -> int:
    """Serve until rank 0 says that it ends. An error is written to stdout in one line."""
    line = sys.stdin.readline()
    if not line:  # rank 0 was gone before it could say what to do
        return 2
    boot = json.loads(line)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_NAME, b"rank %d of %d" % (boot["rank"], boot["size"]))  # for ps, which shows 15 characters
    if os.getppid() != boot["parent"]:
        return 2
    threading.Thread(target=_end_with_leader, daemon=True).start()
    # A supervisor may send its signals to all processes; rank 0 ends its requests first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_up_logging("warning", boot["log"][1])
    recipe = named(boot["recipe"])
    link = socket.socket(fileno=boot["link"])
    ranks = Ranks.joined(boot["memory"], boot["rank"], boot["size"], [link])
    try:
        with heap.starting():
            options = recipe.options(**boot["options"])
            builder = startup.Builder(recipe, Path(boot["model_dir"]), options, NoFollowers(ranks))
            following = builder.following()
        runner, ring = following.runner, Ring(boot["ring"], ranks.size - 1)
        spin_s = SPIN_S[runner.stream.device.kind]
        follow_leader(
            runner, RingReader(ring, ranks.rank - 1, boot["bell"], spin_s=spin_s), following.commands
        )
        following.close()
    except Exception as error:
        if not is_users_error(error):
            log.exception("rank %d of %d", ranks.rank, ranks.size)
        print(one_line(error), flush=True)
        return 1
    return 0


def _end_with_leader() -> None:
    while os.read(0, 1):  # returns nothing once the other end of the pipe is gone
        pass
    os._exit(2)


if __name__ == "__main__":
    sys.exit(main())
