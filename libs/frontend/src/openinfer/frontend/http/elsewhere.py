"""Routes and fields that other servers have and this one has not, and what to use instead."""

from collections.abc import Iterable
from difflib import get_close_matches

_PATHS = {
    "close the connection of a request": "/abort_requests",
    "use /v1/chat/completions": "/api/chat",
    "use /v1/completions": "/api/generate",
    "this server generates text; run a model of that kind with another server": (
        "/classify /pooling /rerank /score /v1/audio/speech /v1/audio/transcriptions "
        "/v1/audio/translations /v1/embeddings /v1/images/generations /v1/moderations /v1/rerank "
        "/v1/score /v2/rerank"
    ),
    "use /openapi.json, or the page at /": "/docs /redoc",
    "use /v1/completions, which takes token ids too": "/generate",
    "use /v1/models": "/get_model_info",
    "use /version, /state and /metrics": "/get_server_info /server_info",
    "use /v1/completions with a prompt of token ids and return_token_ids": "/inference/v1/generate",
    "use /v1/chat/completions or /v1/completions": "/invocations",
    "use /sleep and /wake_up": "/pause /resume",
    "start the server with --no-enable-prefix-caching, or give requests a cache_salt": "/reset_prefix_cache",
    "use `openinfer bench step`, or the metrics openinfer:step_seconds": "/start_profile /stop_profile",
    "use /v1/responses": "/v1/assistants /v1/threads",
    "send each line of a batch as a request of its own; many run at once": (
        "/v1/batches /v1/chat/completions/batch /v1/files"
    ),
    "use /v1/chat/completions, or /detokenize for text alone": "/v1/chat/completions/derender",
    "use /v1/completions, or /detokenize for text alone": "/v1/completions/derender",
    "use /v1/chat/completions with stream: true": "/v1/realtime",
}
"""Advice -> the paths that it is about."""
_FIELDS = {
    "the chat template writes special tokens; use /v1/completions for other prompts": "add_special_tokens",
    "this server takes and gives text": "audio modalities",
    "stream the answer, or wait for it": "background",
    "use n for several answers, and choose among them by their logprobs": "best_of use_beam_search",
    "start the server with --chat-template FILE": "chat_template",
    "send the messages that are to be read": "context_management",
    "send all items in input": "conversation previous_response_id",
    "use logit_bias, bad_words, allowed_token_ids or structured_outputs": (
        "custom_logit_processor logits_processors"
    ),
    "write them into a message": "documents",
    "it belongs to beam search; leave it out": "early_stopping length_penalty",
    "use /v1/completions": "echo",
    "use cache_salt": "extra_key",
    "use tool_choice": "function_call",
    "use tools": "functions",
    "a regex or grammar in structured_outputs says every space": (
        "guided_whitespace_pattern structured_outputs.disable_any_whitespace "
        "structured_outputs.whitespace_pattern"
    ),
    "use logprobs, with allowed_token_ids where only these tokens may come": "logprob_token_ids",
    "give the adapter's name in model": "lora lora_path lora_request",
    "let the client call such tools, and give them in tools": "mcp_servers",
    "write the prompt into instructions and input": "prompt",
    "send text or token ids": "prompt_embeds",
    "use repetition_penalty and max_tokens": "repetition_detection",
    "use /v1/chat/completions/render, and /detokenize for its token_ids": "return_prompt_text",
    "use stop": "stop_regex",
    "use tools with strict, or structured_outputs.grammar": (
        "structural_tag structured_outputs.structural_tag"
    ),
    "write additionalProperties into the schema": "structured_outputs.disable_additional_properties",
    "write the model's own tokens for filling in into the prompt": "suffix",
    "use /v1/chat/completions": "top_logprobs",
    "shorten the prompt in the client; /tokenize counts its tokens": "truncate_prompt_tokens",
    "search in the client, and give what it found by a tool": "web_search_options",
}
"""Advice -> the fields."""
_OF_PATH, _OF_FIELD = (
    {name: advice for advice, names in table.items() for name in names.split()} for table in (_PATHS, _FIELDS)
)


def hint(path: str, routes: Iterable[str]) -> str:
    """Advice to append to an error's message; empty for a path that is like none of `routes` and of other servers."""
    found = _OF_PATH.get(path.rstrip("/"))
    if path.startswith("/v1/responses/"):
        found = "answers are not stored; use /v1/responses with store: false"
    if found is None and (close := get_close_matches(path[:200], [*routes], n=1, cutoff=0.8)):
        found = f"did you mean {close[0]}?"
    return f"; {found}" if found else ""


def instead(field: str) -> str:
    """Advice about a field that is refused."""
    return _OF_FIELD.get(field, "leave it out")
