"""kv_transfer_params of a request: which of them an engine can honour."""

from openinfer.frontend.contract import EngineInfo
from openinfer.frontend.errors import APIError
from openinfer.frontend.http.body import CommonBody
from openinfer.frontend.kv_transfer import KVTransfer

__all__ = ["check_single", "kv_transfer_of"]


def kv_transfer_of(body: CommonBody, n: int, info: EngineInfo) -> KVTransfer | None:
    """The field, if it asks for anything. Raises APIError (400)."""
    given = body.kv_transfer_params
    if given is None or not (given.do_remote_decode or given.do_remote_prefill):
        return None
    if "kv_transfer" not in info.features:
        raise _refusal(
            "kv_transfer_params is not supported by this engine; start it with --kv-transfer-config"
        )
    if given.do_remote_decode and given.do_remote_prefill:
        raise _refusal("kv_transfer_params has both do_remote_decode and do_remote_prefill; give one of them")
    if given.do_remote_prefill and (not given.remote_host or not 0 < (given.remote_port or 0) < 65536):
        raise _refusal("kv_transfer_params with do_remote_prefill needs remote_host and remote_port")
    if given.do_remote_decode and body.stream:
        raise _refusal(
            "do_remote_decode is not possible with stream: true: a whole answer says where the KV is"
        )
    if given.do_remote_decode and n > 1:
        raise _refusal(f"do_remote_decode is not possible with n: {n}; the decode server makes the choices")
    if body.prompt_logprobs is not None:
        raise _refusal(
            "kv_transfer_params is not possible with prompt_logprobs, which need the whole prompt computed"
        )
    return given


def check_single(given: KVTransfer | None, prompts: int) -> None:
    """Raise APIError (400) where several prompts would share the field."""
    if given is not None and prompts > 1:
        raise _refusal(f"kv_transfer_params is of one prompt, and {prompts} are given; send them one by one")


def _refusal(message: str) -> APIError:
    return APIError(message, param="kv_transfer_params", code="unsupported")
