"""KVTransfer: how a request's KV goes from the engine that prefills to the engine that decodes.

The keys are those of vLLM's NixlConnector, as its P/D proxies send them
(https://docs.vllm.ai/en/stable/features/nixl_connector_usage/, and toy_proxy_server.py in vLLM's tests). A proxy sends
a request to the prefill server with do_remote_decode and max_tokens 1. It puts the kv_transfer_params of that answer
into the request to the decode server.
"""

from typing import Annotated

import msgspec

__all__ = ["KVTransfer"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Block = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | str


class KVTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """kv_transfer_params of a request or an answer. Other keys are ignored."""

    do_remote_decode: bool | None = None
    """Another engine decodes: keep the prompt's blocks for it, and say in the answer where they are."""
    do_remote_prefill: bool | None = None
    """Another engine has computed the prompt: fetch its blocks."""
    remote_engine_id: str | None = None
    """The engine_id of that engine."""
    remote_request_id: str | None = None
    """The lease that keeps the blocks there."""
    remote_host: str | None = None
    remote_port: _Count | None = None
    """Where that engine can be asked for them."""
    remote_block_ids: list[list[_Block]] | None = None
    """By group, names of blocks. This engine names the last block alone: a name stands for all tokens before it."""
    remote_num_tokens: _Count | None = None
    """Tokens of the prompt that the blocks hold."""
    tp_size: _Count | None = None
    """Ranks of that engine."""
