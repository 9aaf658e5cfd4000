"""Routes that other servers have and this one has not, and the advice of a 404 about them."""

__all__ = ["hint"]

_GENERATES = "this server generates text; run a model of that kind with another server"
_HINTS = {
    "/classify": _GENERATES,
    "/generate": "use /v1/completions, which takes token ids too",
    "/get_model_info": "use /v1/models",
    "/inference/v1/generate": "use /v1/completions with a prompt of token ids and return_token_ids",
    "/invocations": "use /v1/chat/completions or /v1/completions",
    "/pooling": _GENERATES,
    "/rerank": _GENERATES,
    "/reset_prefix_cache": "start the server with --no-enable-prefix-caching, or give requests a cache_salt",
    "/score": _GENERATES,
    "/server_info": "use /version, /state and /metrics",
    "/start_profile": "use `openinfer bench step`, or the metrics openinfer:step_seconds",
    "/stop_profile": "use `openinfer bench step`, or the metrics openinfer:step_seconds",
    "/v1/audio/speech": _GENERATES,
    "/v1/audio/transcriptions": _GENERATES,
    "/v1/audio/translations": _GENERATES,
    "/v1/chat/completions/derender": "use /v1/chat/completions, or /detokenize for text alone",
    "/v1/completions/derender": "use /v1/completions, or /detokenize for text alone",
    "/v1/embeddings": _GENERATES,
    "/v1/images/generations": _GENERATES,
    "/v1/moderations": _GENERATES,
    "/v1/rerank": _GENERATES,
    "/v1/score": _GENERATES,
    "/v2/rerank": _GENERATES,
}


def hint(path: str) -> str:
    """Advice to append to an error's message; empty for a path that no other server has."""
    found = _HINTS.get(path.rstrip("/"))
    if path.startswith("/v1/responses/"):
        found = "answers are not stored; use /v1/responses with store: false"
    return f"; {found}" if found else ""
