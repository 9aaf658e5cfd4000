"""Routes and fields that other servers have and this one has not, and what to use instead."""

from collections.abc import Iterable
from difflib import get_close_matches

_GENERATES = "this server generates text; run a model of that kind with another server"
_BATCH = "send each line of a batch as a request of its own; many run at once"
_HINTS = {
    "/abort_requests": "close the connection of a request",
    "/api/chat": "use /v1/chat/completions",
    "/api/generate": "use /v1/completions",
    "/classify": _GENERATES,
    "/docs": "use /openapi.json, or the page at /",
    "/generate": "use /v1/completions, which takes token ids too",
    "/get_model_info": "use /v1/models",
    "/get_server_info": "use /version, /state and /metrics",
    "/inference/v1/generate": "use /v1/completions with a prompt of token ids and return_token_ids",
    "/invocations": "use /v1/chat/completions or /v1/completions",
    "/pause": "use /sleep and /wake_up",
    "/pooling": _GENERATES,
    "/redoc": "use /openapi.json, or the page at /",
    "/rerank": _GENERATES,
    "/reset_prefix_cache": "start the server with --no-enable-prefix-caching, or give requests a cache_salt",
    "/resume": "use /sleep and /wake_up",
    "/score": _GENERATES,
    "/server_info": "use /version, /state and /metrics",
    "/start_profile": "use `openinfer bench step`, or the metrics openinfer:step_seconds",
    "/stop_profile": "use `openinfer bench step`, or the metrics openinfer:step_seconds",
    "/v1/assistants": "use /v1/responses",
    "/v1/audio/speech": _GENERATES,
    "/v1/audio/transcriptions": _GENERATES,
    "/v1/audio/translations": _GENERATES,
    "/v1/batches": _BATCH,
    "/v1/chat/completions/batch": _BATCH,
    "/v1/chat/completions/derender": "use /v1/chat/completions, or /detokenize for text alone",
    "/v1/completions/derender": "use /v1/completions, or /detokenize for text alone",
    "/v1/embeddings": _GENERATES,
    "/v1/files": _BATCH,
    "/v1/images/generations": _GENERATES,
    "/v1/moderations": _GENERATES,
    "/v1/realtime": "use /v1/chat/completions with stream: true",
    "/v1/rerank": _GENERATES,
    "/v1/score": _GENERATES,
    "/v1/threads": "use /v1/responses",
    "/v2/rerank": _GENERATES,
}


_CANDIDATES = "use n for several answers, and choose among them by their logprobs"
_LOGITS = "use logit_bias, bad_words, allowed_token_ids or structured_outputs"
_LORA = "give the adapter's name in model"
_OF_BEAMS = "it belongs to beam search; leave it out"
_SPACES = "a regex or grammar in structured_outputs says every space"
_TEXT = "this server takes and gives text"
_FIELDS = {
    "add_special_tokens": "the chat template writes special tokens; use /v1/completions for other prompts",
    "audio": _TEXT,
    "background": "stream the answer, or wait for it",
    "best_of": _CANDIDATES,
    "chat_template": "start the server with --chat-template FILE",
    "context_management": "send the messages that are to be read",
    "conversation": "send all items in input",
    "custom_logit_processor": _LOGITS,
    "documents": "write them into a message",
    "early_stopping": _OF_BEAMS,
    "echo": "use /v1/completions",
    "extra_key": "use cache_salt",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_whitespace_pattern": _SPACES,
    "length_penalty": _OF_BEAMS,
    "logits_processors": _LOGITS,
    "logprob_token_ids": "use logprobs, with allowed_token_ids where only these tokens may come",
    "lora": _LORA,
    "lora_path": _LORA,
    "lora_request": _LORA,
    "mcp_servers": "let the client call such tools, and give them in tools",
    "modalities": _TEXT,
    "previous_response_id": "send all items in input",
    "prompt": "write the prompt into instructions and input",
    "prompt_embeds": "send text or token ids",
    "repetition_detection": "use repetition_penalty and max_tokens",
    "return_prompt_text": "use /v1/chat/completions/render, and /detokenize for its token_ids",
    "stop_regex": "use stop",
    "structural_tag": "use tools with strict, or structured_outputs.grammar",
    "structured_outputs.disable_additional_properties": "write additionalProperties into the schema",
    "structured_outputs.disable_any_whitespace": _SPACES,
    "structured_outputs.structural_tag": "use tools with strict, or structured_outputs.grammar",
    "structured_outputs.whitespace_pattern": _SPACES,
    "suffix": "write the model's own tokens for filling in into the prompt",
    "top_logprobs": "use /v1/chat/completions",
    "truncate_prompt_tokens": "shorten the prompt in the client; /tokenize counts its tokens",
    "use_beam_search": _CANDIDATES,
    "web_search_options": "search in the client, and give what it found by a tool",
}


def hint(path: str, routes: Iterable[str]) -> str:
    """Advice to append to an error's message; empty for a path that is like none of the `routes` and of other servers.

    routes: the paths that there are.
    """
    found = _HINTS.get(path.rstrip("/"))
    if path.startswith("/v1/responses/"):
        found = "answers are not stored; use /v1/responses with store: false"
    if found is None and (close := get_close_matches(path[:200], [*routes], n=1, cutoff=0.8)):
        found = f"did you mean {close[0]}?"
    return f"; {found}" if found else ""


def instead(field: str) -> str:
    """Advice about a field that is refused."""
    return _FIELDS.get(field, "leave it out")
