"""Peers: engines that share blocks, each through its host memory.

    sharing = Sharing(TransferConfig("TcpConnector"), groups, about={"model": "m"})
    tiers = Tiers(groups, host_bytes=64 << 30, sharing=sharing)

A block is asked for by its name, so it does not matter where either engine keeps it.
"""

from .client import PeerAnswer, Peers
from .config import TransferConfig, parse_peers
from .lane import Address
from .sharing import Sharing

__all__ = ["Address", "PeerAnswer", "Peers", "Sharing", "TransferConfig", "parse_peers"]
