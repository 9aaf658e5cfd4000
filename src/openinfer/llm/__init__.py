"""A model in your own process: text in, text out. The engine is the one that `openinfer serve` runs.

    from openinfer.llm import LLM

    with LLM("demo/qwen3") as llm:
        (answer,) = llm.generate(["The capital of France is"], max_tokens=16)
        print(answer.text)
        for piece in llm.stream([{"role": "user", "content": "What is the capital of France?"}]):
            print(piece, end="", flush=True)

`generate` continues prompts, `chat` answers conversations, and `stream` yields one answer piece by piece. `Grammar`
gives answers a form: `llm.chat(asked, grammar=Grammar.of_schema({"type": "object"}))`.
"""

import argparse
import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from openinfer.cli import hub, recipes
from openinfer.frontend.chat import Message, Renderer, coded_renderer
from openinfer.frontend.contract import Engine, Finished, Request, Scheduled, TokenLogprobs, Update
from openinfer.frontend.http import ChatTemplate, SamplingDefaults, Tokenizer, find_templates
from openinfer.frontend.http.text.detokenizer import Detokenizer, StopStrings
from openinfer.frontend.model_files import read_json
from openinfer.sampler import SamplingParams
from openinfer.sampler.form import Grammar
from openinfer.tensor import CudaError, Device, DriverNotFound, ProgressBar

__all__ = ["LLM", "Answer", "Grammar", "PromptRefused", "SamplingParams"]


Chat = Sequence[Message]
MOST_QUEUED = 1 << 20
"""Prompts that may wait. The limit is high, because prompts of a batch must not be refused as those of clients are."""
BATCH = {"max_num_seqs": 512, "max_num_batched_tokens": 4096}
"""Sizes on a GPU by default. They are twice a server's, because nobody waits for the next token of a batch."""


class PromptRefused(ValueError):
    """The engine cannot run a prompt; the message says why."""

    user_can_mend = True


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt. finish_reason: "stop" (EOS, a stop id or a stop string) or "length". logprobs: of each of
    token_ids, where SamplingParams.logprobs asks for them."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of each answer of a call."""

    sampling: SamplingParams | None
    max_tokens: int | None
    stop: Sequence[str]
    grammar: Grammar | None
    adapter: str


@dataclass(slots=True)
class _Sequence:
    prompt: list[int]
    detokenizer: Detokenizer
    stops: StopStrings | None
    asks_logprobs: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    reason: str = ""
    refusal: str = ""

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Take a token, unless a stop string ended the text already."""
        if not self.reason:
            self.ids.append(token_id)
            self.logprobs += [] if logprobs is None else [logprobs]
            self._show(self.detokenizer.push([token_id]))

    def _show(self, text: str) -> None:
        if self.stops is not None:
            text, matched = self.stops.push(text)
            self.reason = "stop" if matched is not None else ""
        self.pieces.append(text)

    def end(self, update: Update) -> None:
        if not isinstance(update, Finished):
            self.refusal = getattr(update, "reason", "") or getattr(update, "message", "") or str(update)
        elif not self.reason:
            self._show(self.detokenizer.flush())
            if self.stops is not None and not self.reason:
                self.pieces.append(self.stops.flush())
            self.reason = self.reason or update.reason


class LLM:
    """A model in this process, on the GPU if there is one. Not for several threads at once.

    model: a checkpoint directory, demo/NAME in a checkout, or a name of the Hugging Face hub (with revision=).
    flags: the engine's flags of `openinfer serve --help` by their names: device="cpu", max_model_len=4096. On a GPU
    up to 512 sequences and 4,096 tokens share a step, unless max_num_seqs or max_num_batched_tokens is given.

    Raises TypeError for an unknown flag; NoRecipe, ModelFilesError, UnsupportedModel, CheckpointError or SetupError,
    each with one line for the user, for what cannot be served.
    """

    def __init__(self, model: str, **flags: Any) -> None:
        revision = flags.pop("revision", None)
        folder, _ = hub.hub_checkpoint(model, [] if revision is None else ["--revision", str(revision)])
        recipe = recipes.find(folder)
        self._tokenizer = Tokenizer.load(folder)
        self._template = self._find_template(folder)
        self._defaults = SamplingDefaults.load(folder)
        parser = argparse.ArgumentParser(add_help=False)
        recipe.add_arguments(parser)
        args = vars(parser.parse_args([]))
        if "max_num_queued_reqs" in args:
            args["max_num_queued_reqs"] = MOST_QUEUED
        sized = BATCH.keys() <= args.keys() and not BATCH.keys() & flags.keys()
        if sized and _on_a_gpu(str(flags.get("device", args["device"]))):
            args |= BATCH
        unknown = flags.keys() - args.keys()
        if unknown:
            raise TypeError(f"{', '.join(sorted(unknown))}: the engine's flags are {', '.join(sorted(args))}")
        spec = recipe.engine_spec(folder, argparse.Namespace(**{**args, **flags}))
        self._engine: Engine = spec.build()
        self._ids = itertools.count(1)
        self._live: dict[int, _Sequence] = {}
        self._takes_grammars = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the engine's memory."""
        self._engine.close()

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence, prompt and output."""
        return self._engine.info.max_model_len

    def generate(
        self, prompts: str | Sequence[str], sampling: SamplingParams | None = None, *, max_tokens: int | None = None,
        stop: Sequence[str] = (), grammar: Grammar | None = None, adapter: str = "", progress: bool = False,
    ) -> list[Answer]:  # fmt: skip
        """Continue every prompt; all run in one batch. The answers are in the order of the prompts.

        sampling: default: as generation_config.json says. max_tokens: of each answer; default: as many as fit. stop:
        strings that end an answer and are not in it. grammar: the form of each answer, from its first token, such as
        Grammar.of_schema({...}). adapter: one of the flag lora_modules. progress: a bar on stderr. Raises PromptRefused
        for an empty or too long prompt (none is run then), and for what the engine cannot honour.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        asked = _Asked(sampling, max_tokens, stop, grammar, adapter)
        return self._answers([self._encode(text, True) for text in texts], asked, progress)

    def chat(
        self, messages: Chat | Sequence[Chat], sampling: SamplingParams | None = None, *, max_tokens: int | None = None,
        stop: Sequence[str] = (), grammar: Grammar | None = None, adapter: str = "",
        template_kwargs: Mapping[str, Any] | None = None, progress: bool = False,
    ) -> list[Answer]:  # fmt: skip
        """Answer a conversation, or each of several. A message is {"role": ..., "content": ...}.

        An answer's text begins with the model's thoughts, if it thinks.

        template_kwargs: options of the model's template, such as {"enable_thinking": False}. Others: see generate.
        Raises APIError for messages that the template cannot take.
        """
        first = messages[0] if messages else {}
        chats: Any = [messages] if isinstance(first, Mapping) else messages
        prompts = [self._rendered(chat, template_kwargs) for chat in chats]
        return self._answers(prompts, _Asked(sampling, max_tokens, stop, grammar, adapter), progress)

    def stream(
        self, prompt: str | Chat, sampling: SamplingParams | None = None, *, max_tokens: int | None = None,
        stop: Sequence[str] = (), grammar: Grammar | None = None, adapter: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """The answer to a prompt or a conversation, piece by piece. Closing the iterator ends the request. Raises
        PromptRefused as generate does, and for logprobs, which pieces of text do not have."""
        if sampling is not None and sampling.logprobs is not None:
            raise PromptRefused("logprobs: stream yields text; generate and chat return log-probabilities")
        ids = (
            self._encode(prompt, True) if isinstance(prompt, str) else self._rendered(prompt, template_kwargs)
        )
        (request_id,) = self._submit([ids], _Asked(sampling, max_tokens, stop, grammar, adapter))
        sequence, shown = self._live[request_id], 0
        try:
            while shown < len(sequence.pieces) or request_id in self._live:
                if shown == len(sequence.pieces):
                    self._step()  # which others that run may have done too
                    continue
                shown += 1
                if piece := sequence.pieces[shown - 1]:
                    yield piece
        finally:
            self._drop([request_id])
        if sequence.refusal:
            raise PromptRefused(sequence.refusal)

    def _answers(self, prompts: Sequence[list[int]], asked: _Asked, progress: bool) -> list[Answer]:
        request_ids = self._submit(prompts, asked)
        sequences = [self._live[request_id] for request_id in request_ids]
        bar = ProgressBar("generating", things="prompts") if progress else None
        try:
            while left := sum(request_id in self._live for request_id in request_ids):
                if bar is not None:
                    bar(len(sequences) - left, len(sequences))
                self._step()
        finally:
            self._drop(request_ids)
        if bar is not None:
            bar(len(sequences), len(sequences))
        for number, sequence in enumerate(sequences):
            if sequence.refusal:
                raise PromptRefused(f"prompt {number}: {sequence.refusal}")
        return [
            Answer("".join(s.pieces), s.ids, s.prompt, s.reason, s.logprobs if s.asks_logprobs else None)
            for s in sequences
        ]

    def _submit(self, prompts: Sequence[list[int]], asked: _Asked) -> list[int]:
        """The ids of the requests. Raises PromptRefused before the first is submitted."""
        sampling = asked.sampling or self._defaults.params()
        if asked.grammar is not None and not self._takes_grammars:
            table = self._tokenizer.token_table("")
            if table is None:
                raise PromptRefused("grammar: a token of this tokenizer is no fixed bytes, as grammars need")
            self._engine.control(table)
            self._takes_grammars = True
        for number, prompt in enumerate(prompts):
            if not 1 <= len(prompt) < self.max_model_len:
                raise PromptRefused(
                    f"prompt {number} has {len(prompt)} tokens; 1 to {self.max_model_len - 1} are possible"
                )
        found = []
        for prompt in prompts:
            request_id, room = next(self._ids), self.max_model_len - len(prompt)
            self._live[request_id] = _Sequence(
                prompt,
                self._tokenizer.detokenizer(True),
                StopStrings(asked.stop, False) if asked.stop else None,
                sampling.logprobs is not None,
            )
            limit = room if asked.max_tokens is None else min(asked.max_tokens, room)
            self._engine.submit(
                Request(
                    id=request_id, prompt_token_ids=prompt, sampling=sampling, max_tokens=limit,
                    arrival=time.monotonic(), grammar=asked.grammar, adapter=asked.adapter,
                )
            )  # fmt: skip
            found.append(request_id)
        return found

    def _step(self) -> None:
        outputs = self._engine.step(wait=1.0)
        logprobs = outputs.logprobs or [None] * len(outputs.token_ids)
        for request_id, token_id, one in zip(outputs.request_ids, outputs.token_ids, logprobs, strict=True):
            if sequence := self._live.get(request_id):
                sequence.push(token_id, one)
                if sequence.reason:
                    self._drop([request_id])
        for update in outputs.updates:
            if not isinstance(update, Scheduled) and (sequence := self._live.pop(update.id, None)):
                sequence.end(update)

    def _drop(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if self._live.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _encode(self, text: str, special: bool) -> list[int]:
        return asyncio.run(self._tokenizer.encode(text, add_special_tokens=special))

    def _rendered(self, messages: Chat, kwargs: Mapping[str, Any] | None) -> list[int]:
        if self._template is None:
            raise PromptRefused("the checkpoint has no chat template: use generate() with a prompt as text")
        return self._encode(self._template.render(messages, kwargs=kwargs), False)

    def _find_template(self, folder: Any) -> Renderer | None:
        source, with_tools = find_templates(folder, self._tokenizer.config)
        if source is not None:
            return ChatTemplate(source, self._tokenizer.special_tokens, with_tools)
        return coded_renderer(folder, str(read_json(folder / "config.json").get("model_type")))


def _on_a_gpu(device: str) -> bool:
    try:
        return device.startswith("cuda") or (device == "auto" and Device("cuda", 0).kind == "cuda")
    except (CudaError, DriverNotFound):
        return False
