"""What JSON bodies have in common, typed. A known field that is not supported is refused by name.

Unknown fields are ignored. A known one that would change the answer is honoured or answered with 400.
"""

import asyncio
import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import inspect as info
from starlette.requests import ClientDisconnect, Request

from openinfer.frontend.contract import KVTransfer
from openinfer.frontend.errors import APIError, NotSupported
from openinfer.frontend.http.elsewhere import instead
from openinfer.sampler.params import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIASES

MAX_BODY_BYTES = 32 << 20
MAX_OBJECTS = 1 << 18
"""Objects, arrays and strings of a body together."""
MAX_VALUES = 1 << 22
BODY_TIMEOUT_S = 60.0
"""The longest time from the end of the head to that of the body. A client that sends a byte now and then is cut too."""
MAX_TOOLS = 128
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 64
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Budget = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
# What follows is only told by the OpenAPI document; params.py and the sampler check it, in words of their own.
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 32
MAX_SALT_CHARS = 128
Positive = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1})]
Choices = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1, "maximum": MAX_N})]
Logprobs = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": MAX_LOGPROBS})]
MinTokens = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": 2**31 - 1})]
Seed = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**63 - 1})]
TopK = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": -1, "maximum": 2**31 - 1})]
TopP = Annotated[float, msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})]
MinP = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
Temperature = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": 0, "maximum": 2})]
Penalty = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": -2, "maximum": 2})]
Repetition = Annotated[float, msgspec.Meta(extra_json_schema={"minimum": 0.01, "maximum": 100})]
Salt = Annotated[str, msgspec.Meta(extra_json_schema={"maxLength": MAX_SALT_CHARS})]
StopString = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1})]
StopStrings = Annotated[list[StopString], msgspec.Meta(extra_json_schema={"maxItems": MAX_STOP_STRINGS})]
Messages = Annotated[list[dict[str, Any]], msgspec.Meta(extra_json_schema={"minItems": 1})]


class Body(msgspec.Struct):
    """A JSON body. refused: known fields that are not honoured, with the values that ask for nothing."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = types.MappingProxyType({})


class StreamOptions(msgspec.Struct):
    """stream_options."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """response_format: anything."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """response_format: any JSON object."""


class JsonSchemaSpec(msgspec.Struct):
    """The schema with its name. It is kept to with `strict` and without."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """response_format: JSON after a schema."""

    json_schema: JsonSchemaSpec


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct):
    """vLLM's structured_outputs: one of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class AnyBody(Body, kw_only=True):
    """The fields that all dialects have; None is a field that was not given. Values are checked in params.py."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stream: bool | None = None


class CommonBody(AnyBody, kw_only=True):
    """The fields that completions and chats take. Those of other dialects become one."""

    max_tokens: Positive | None = None
    min_tokens: MinTokens | None = None
    min_p: MinP | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_LOGIT_BIASES)] | None = None
    allowed_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    seed: Seed | None = None
    n: Choices | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens of log-probabilities are `token_id:5`, not their text."""
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: Salt | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    prompt_logprobs: int | None = None
    kv_transfer_params: KVTransfer | None = None
    disable_spec_decode: bool | None = None


def common_body(body: AnyBody, **fields: Any) -> CommonBody:
    """The body of another dialect as what all endpoints share; `fields` has its own names for things."""
    return CommonBody(**{name: getattr(body, name) for name in AnyBody.__struct_fields__}, **fields)


class FunctionSpec(msgspec.Struct, omit_defaults=True):
    """A function on offer. With `strict` its calls are held to `parameters`; forced calls always are."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(msgspec.Struct):
    """One of `tools`."""

    type: Literal["function"]
    function: FunctionSpec


class Thinking(msgspec.Struct):
    """thinking."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Budget | None = None


_REFUSED: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((None, 1), "length_penalty best_of"),
    ((None, False), "use_beam_search early_stopping watermarking return_hidden_states return_prompt_text"),
    ((None, ""), "suffix"),
    ((None,), "prompt_embeds truncate_prompt_tokens structural_tag guided_whitespace_pattern stop_regex"),
    ((None,), "chat_template audio web_search_options repetition_detection custom_logit_processor"),
    ((None,), "lora lora_path lora_request extra_key"),
    ((None, []), "logprob_token_ids functions documents logits_processors"),
    ((None, "none", "auto"), "function_call"),
    ((None, ["text"]), "modalities"),
    ((None, {}), "vllm_xargs"),
)
REFUSED = {name: values for values, names in _REFUSED for name in names.split()}
"""Of completions and chats."""
_WHERE = re.compile(r" - at `\$\.?(?P<path>(?P<field>\w*)[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_Body = TypeVar("_Body", bound=Body)


async def read_json_body(request: Request, kind: type[_Body], *, empty: _Body | None = None) -> _Body:
    """The body. empty: of one without bytes. Raises APIError: 400 that names the field where there is one, or where the
    client leaves within the body; 408 for one that takes too long, 413 for one that is too large, 415 for one that is
    not JSON by its Content-Type."""
    media = request.headers.get("content-type")
    if media is not None and media.partition(";")[0].strip().lower() != "application/json":
        raise APIError(
            f"the Content-Type is {media[:80]!r}; this path takes application/json (curl: --json, or "
            "-H 'Content-Type: application/json')",
            status=415,
            code="unsupported_media_type",
        )
    raw = await _read(request)
    if not raw and empty is not None:
        return empty
    _check_count(raw)
    return _decode(raw, kind)


async def _read(request: Request) -> bytes:
    too_large = APIError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413, code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except ClientDisconnect as error:
        raise APIError("the connection ended before the body did") from error
    except TimeoutError as error:
        raise APIError(f"the body took longer than {BODY_TIMEOUT_S:g} s", status=408) from error
    return bytes(body)


def _check_count(raw: bytes) -> None:
    """Raise APIError (413) for more values than a request needs: each takes far more memory and time than its bytes.
    The text of strings does not count. To parse in a thread would not help, because that holds the interpreter lock."""
    if len(raw) < 2 * MAX_OBJECTS:  # an empty list has two bytes
        return
    bare = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    objects = bare.count(b'"') // 2
    if objects <= MAX_OBJECTS:
        outside = b"".join(bare.split(b'"')[::2])
        objects += outside.count(b"[") + outside.count(b"{")
        if objects <= MAX_OBJECTS and outside.count(b",") <= MAX_VALUES:
            return
    raise APIError(
        f"the body has more than {MAX_OBJECTS} objects, arrays and strings, or {MAX_VALUES} values",
        status=413,
        code="body_too_large",
    )


def _decode(raw: bytes, kind: type[_Body]) -> _Body:
    try:
        fields = msgspec.json.decode(raw)
        if not isinstance(fields, dict):
            raise APIError(f"the body must be a JSON object, not {_json_type(fields)}")
        for name in kind.refused.keys() & fields.keys():
            if not _asks_for_nothing(fields[name], kind.refused[name]):
                raise NotSupported(f"{name} is not supported by this server: {instead(name)}", name)
        return msgspec.convert(fields, kind, strict=False)  # "5" and 5.0 are 5, as many clients write
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise APIError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise APIError("the body is nested too deeply") from error


def typed(value: dict[str, Any], kind: type[_Struct], field: str, where: str) -> _Struct:
    """An object within a body. Raises APIError (400) naming the field and the place."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise APIError(f"{where}: {error}".replace("`", ""), param=field) from error


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    # False == 0 and True == 1, but a boolean is not a number in JSON.
    return any(value == word and isinstance(value, bool) == isinstance(word, bool) for word in neutral)


def _wrong_type(message: str, kind: type[msgspec.Struct]) -> APIError:
    where = _WHERE.search(message)
    if where is None:
        if missing := _MISSING.fullmatch(message):
            return APIError(f"{missing['field']} is missing", param=missing["field"])
        return APIError(message)
    what = message[: where.start()].replace("`", "").replace(" | null", "")
    if what.startswith("Invalid") and (words := _words(kind, where["path"])):
        what += f", allowed are {', '.join(words)}"
    return APIError(f"{where['path']}: {what[0].lower()}{what[1:]}", param=where["field"] or None)


def _words(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The words that the field at a path such as tools[0].type may have; none if it is no choice among words."""
    types: list[info.Type] = [info.type_info(kind)]
    for name in re.findall(r"\w+", path):
        types = [inner for one in types for inner in _within(one, name)]
    return [
        str(word)
        for one in types
        for inner in _each(one)
        if isinstance(inner, info.LiteralType)
        for word in inner.values
    ]


def _within(found: info.Type, name: str) -> Iterator[info.Type]:
    """The types that a field, or an index, of this type may have."""
    for one in _each(found):
        if isinstance(one, info.ListType) and name.isdigit():
            yield one.item_type
        elif isinstance(one, info.StructType):
            yield from (field.type for field in one.fields if field.encode_name == name)
            if name == one.tag_field:
                yield info.LiteralType((one.tag,))


def _each(found: info.Type) -> tuple[info.Type, ...]:
    return found.types if isinstance(found, info.UnionType) else (found,)


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
