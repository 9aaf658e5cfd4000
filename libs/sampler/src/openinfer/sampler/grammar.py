"""Structured output: a grammar compiled against a vocabulary, and for every step the mask of tokens that may come next.

Importing this needs the standard library only. A `Compiler` needs the extra [grammar] (llguidance).
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import TYPE_CHECKING

from openinfer.sampler.budget import Spending
from openinfer.sampler.errors import GrammarFailed, InvalidGrammar, MissingExtra
from openinfer.sampler.form import JSON_OPTIONS, Grammar
from openinfer.sampler.json_rules import has_long_strings
from openinfer.sampler.lark import Lark
from openinfer.sampler.schema import prepared

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MAX_STATES = 50_000
"""The most states of one request's lexer, at 1 to 2 KB each."""
LEXER_FUEL = 200_000
"""Bounds the work on a grammar's expressions for its first mask: with llguidance's default of a million a short
expression takes a second of CPU time and 200 MB."""
MAX_ROW, MAX_WRITTEN_ROW = 10_000, 600
"""The most items of a parser's row, and of a row of a grammar that a client wrote. The work for a mask grows with the
square of an ambiguous grammar's rows: at 600 a mask takes about 10 ms. Our own grammars are not ambiguous. The end of a
long text that is counted has a long row."""
MAX_REASON_CHARS = 2000
REFUSED_BYTES = 1 << 20
"""What is kept of grammars that were refused: their texts and the reasons."""


class Matcher:
    """The state of one sequence's grammar. Belongs to one thread at a time.

    matcher: llguidance's; None for a grammar of the kind "any". spending: of the grammar's budget.
    """

    def __init__(
        self, matcher: "LLMatcher | None", vocabulary: int, spending: Spending | None = None
    ) -> None:
        self._inner, self._vocabulary, self._spending = matcher, vocabulary, spending
        self.forces = False
        """Whether the last mask has the token alone that closes a thought."""

    def fill(self, mask: "NDArray[np.int32]") -> None:
        """Write which tokens may come next into int32[(V + 31) // 32], contiguous: bit t % 32 of word t // 32. The
        model's EOS is among them where the output may end, and alone where it must.

        Raises GrammarFailed where the grammar got too complex for its limits.
        """
        words = -(-self._vocabulary // 32)
        if mask.dtype != "int32" or mask.shape != (words,) or not mask.flags.c_contiguous:
            raise ValueError(f"mask is {mask.dtype}{list(mask.shape)}: it must be contiguous int32[{words}]")
        if self._inner is None:
            mask.fill(-1)
        else:
            self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if self._spending is not None:
            self.forces = self._spending.restrict(mask)

    def allowed(self) -> "NDArray[np.bool_]":
        """The mask as new bool[V]; ``~allowed()`` is a row of `forbid` for ``sample_arrays``."""
        import numpy as np  # at this place, because processes that serve HTTP do without numpy

        mask = np.zeros(-(-self._vocabulary // 32), np.int32)
        self.fill(mask)
        return np.unpackbits(mask.view(np.uint8), count=self._vocabulary, bitorder="little").view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on by a token that was drawn under the mask (EOS ends the grammar).

        Raises GrammarFailed if the grammar does not allow it; the matcher is of no use then.
        """
        if self._inner is not None and not self._inner.consume_token(token):
            self._check()
        if self._spending is not None:
            self._spending.accept(token)

    def copy(self) -> "Matcher":
        """A matcher in the same state, which goes its own way."""
        inner = None if self._inner is None else self._inner.deep_copy()
        return Matcher(inner, self._vocabulary, None if self._spending is None else self._spending.copy())

    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar leaves one text only. The mask of each has no other token."""
        return [] if self._inner is None else list(self._inner.compute_ff_tokens())

    @property
    def may_end(self) -> bool:
        """Whether what came so far is a whole output."""
        return self._inner is None or bool(self._inner.is_accepting())

    @property
    def must_end(self) -> bool:
        """Whether what came so far is a whole output that nothing but EOS can follow."""
        return self._inner is not None and self.may_end and bool(self._inner.is_stopped())

    @property
    def failure(self) -> str:
        """Why the matcher can no longer be used; empty while it can."""
        if self._inner is None or not self._inner.is_error():
            return ""
        return _first_line(self._inner.get_error())

    def _check(self) -> None:
        if failure := self.failure:
            raise GrammarFailed(failure)


class Compilation:
    """A grammar that a worker compiles."""

    def __init__(
        self, future: "Future[LLMatcher | str] | None", new: "Callable[[LLMatcher | None], Matcher]"
    ) -> None:
        self._future, self._new = future, new

    def poll(self, wait_s: float | None = 0.0) -> Matcher | None:
        """The matcher, to be taken once; None if the worker is still at it after `wait_s` seconds.

        Raises InvalidGrammar with the reason."""
        if self._future is None:
            return self._new(None)
        try:
            found = self._future.result(wait_s)
        except FutureTimeout:
            return None
        if isinstance(found, str):
            raise InvalidGrammar(found)
        return self._new(found)

    def wait(self) -> Matcher:
        """Like `poll`, but waits for the worker."""
        found = self.poll(None)
        assert found is not None
        return found


class Compiler:
    """Grammars to matchers for one vocabulary, in worker threads that do not hold the GIL.

    Every matcher is compiled anew: copies of one would share its lexer, and with it the limits of a request. Work and
    size bound a compilation, a mask and a matcher; time does not. Refused grammars are remembered with the reason,
    within REFUSED_BYTES; nothing else is kept.

    tokens: the bytes of token 0, 1, ...; special_ids: those that no text can be; eos_ids: those that end an output;
    vocabulary: the model's, where it is larger than the tokens. tokenizer: the model's own as JSON (tokenizer.json), by
    which text that a grammar forces is cut; without one the model chooses among all cuts.

    Raises MissingExtra without llguidance.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        *,
        tokenizer: str = "",
        vocabulary: int | None = None,
        workers: int = 2,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise MissingExtra("llguidance is missing: pip install 'openinfer-sampler[grammar]'") from error
        self._ll = llguidance
        self._vocabulary = len(tokens) if vocabulary is None else vocabulary
        # A token of no bytes is never allowed.
        self._tokens = [*tokens, *[b""] * (self._vocabulary - len(tokens))]
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="grammar")
        self._own = self._workers.submit(_loaded, tokenizer) if tokenizer else None
        vocabulary_of = _Tokens(self._tokens, special_ids, eos_ids[0])
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary_of), eos_token=list(eos_ids)
        )
        vocabulary_of.cut = self._cut
        self._refused: OrderedDict[Grammar, str] = OrderedDict()
        self._refused_bytes, self._lock = 0, threading.Lock()

    def start(self, grammar: Grammar) -> Compilation:
        """Have a worker compile the grammar. Never blocks."""
        future = None
        if grammar.kind != "any":
            future = self._workers.submit(self._compile, replace(grammar, budget=None))

        def new(matcher: "LLMatcher | None") -> Matcher:
            spending = Spending(grammar.budget, self._tokens) if grammar.budget is not None else None
            return Matcher(matcher, self._vocabulary, spending)

        return Compilation(future, new)

    def compile(self, grammar: Grammar) -> Matcher:
        """A new matcher for the grammar. Raises InvalidGrammar."""
        return self.start(grammar).wait()

    def close(self) -> None:
        """Stop the workers; what waits for one is dropped."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> "LLMatcher | str":
        """The matcher, or why there is none. Nothing is raised: an exception would keep what failed."""
        reason = self._refused.get(grammar)
        if reason is not None:
            return reason
        try:
            return self._compiled(grammar)
        except InvalidGrammar as error:
            reason = str(error)
        # A bug in the compiler, and a panic is no Exception: one request's grammar must not take an engine along.
        except BaseException as error:
            reason = f"{_named(grammar)}: the compiler fails: {_first_line(str(error))}"
        reason = reason[:MAX_REASON_CHARS]  # it may quote an expression at length
        self._remember(grammar, reason)
        return reason

    def _remember(self, grammar: Grammar, reason: str) -> None:
        def size(grammar: Grammar, reason: str) -> int:
            content = grammar.content.text if grammar.content else ""
            return 4 * (len(grammar.text) + len(content) + len(reason)) + 1024

        with self._lock:
            if grammar in self._refused:
                return
            self._refused[grammar] = reason
            self._refused_bytes += size(grammar, reason)
            while self._refused_bytes > REFUSED_BYTES:
                self._refused_bytes -= size(*self._refused.popitem(last=False))

    def _compiled(self, grammar: Grammar) -> "LLMatcher":
        written = (grammar.content or grammar).kind in ("lark", "gbnf")
        limits = self._ll.LLParserLimits(
            verbose_errors=False,
            max_lexer_states=MAX_STATES,
            initial_lexer_fuel=LEXER_FUEL,
            max_items_in_row=MAX_WRITTEN_ROW if written else MAX_ROW,
            step_max_items=50_000 if written else 10 * MAX_ROW,
        )
        matcher = self._ll.LLMatcher(self._tokenizer, self._translated(grammar), log_level=0, limits=limits)
        probe = matcher.deep_copy()
        if not probe.is_error():
            # Most of the work on expressions is done for the first token, and most of what can fail fails with it.
            last = int.from_bytes(probe.compute_bitmask(), "little").bit_length() - 1  # of the tokens allowed
            if last >= 0:
                probe.consume_token(last)
        if probe.is_error():
            raise InvalidGrammar(f"{_named(grammar)}: {_problem(probe.get_error())}")
        return matcher

    def _cut(self, text: str) -> list[int]:
        own = None if self._own is None else self._own.result()
        return self._tokenizer.greedy_tokenize(text) if own is None else own.tokenize_str(text)

    def _translated(self, grammar: Grammar) -> str:
        """The grammar in llguidance's own form."""
        if grammar.content is not None:
            outer, content = grammar.text, self._alone(grammar.content)
        else:
            outer, content = "start: @content", self._alone(grammar)
        if self._own is None or self._own.result() is None:
            outer = f'%llguidance {{"no_forcing": true}}\n{outer}'  # the model chooses its own cut
        elif grammar.content is None:
            return content
        # llguidance translates a grammar into a JSON list of one, but leaves Lark text unchanged.
        inner = json.loads(content)["grammars"][0] if content.startswith("{") else {"lark_grammar": content}
        return json.dumps({"grammars": [{"lark_grammar": outer}, {**inner, "name": "content"}]})

    def _alone(self, grammar: Grammar) -> str:
        make = self._ll.LLMatcher
        match grammar.kind:
            case "json_schema":
                schema = json.loads(grammar.text)
                if has_long_strings(schema):
                    lark = Lark()
                    return make.grammar_from_lark(lark.grammar(lark.json(schema)).text)
                schema = prepared(schema)
                schema.pop("x-guidance", None)  # options of the compiler are not the user's
                return make.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
            case "json_object":
                return make.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS)
            case "regex":
                return make.grammar_from_regex(grammar.text)
            case "any":
                return make.grammar_from_regex("(?s:.*)")
            case "choice":
                texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
                return make.grammar_from_lark("start: " + " | ".join(texts))
            case "lark" | "parts":
                return make.grammar_from_lark(grammar.text)
            case "gbnf":
                return make.grammar_from_lark(_lark_of_gbnf(grammar.text))


class _Tokens:
    """A vocabulary in the form that llguidance needs. cut: where a grammar leaves one text only, llguidance has it cut
    into tokens and allows just these."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = list(tokens), list(special_ids), eos_id
        self.cut: Callable[[str], list[int]] = _no_cut

    def __call__(self, text: str) -> list[int]:
        return self.cut(text)


def _loaded(tokenizer: str) -> "LLTokenizer | None":
    """A tokenizer from its JSON; None for one that llguidance cannot read."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(tokenizer)
    except BaseException:  # a panic is no Exception
        return None


def _named(grammar: Grammar) -> str:
    """The kind of the part that a client wrote."""
    kind = (grammar.content or grammar).kind
    return "lark" if kind == "parts" else kind


def _no_cut(text: str) -> list[int]:
    raise TypeError(f"no text is cut before there is a tokenizer: {text!r}")


def _lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises plain Exceptions and stumbles over what it does not expect
        raise InvalidGrammar(f"gbnf: {error}") from error


def _problem(text: str) -> str:
    """An error without the lines of the grammar that it quotes: a Lark text is often not the user's own."""
    quoted = re.compile(r"\s*(\d+ \||\^\s*$|<non-verbose/>)")
    lines = [line for line in text.strip().splitlines() if not quoted.match(line)]
    return "no output fits the grammar" if lines == ["NoExtensionBias"] else "\n".join(lines)


def _first_line(text: str) -> str:
    return _problem(text).partition("\n")[0]
