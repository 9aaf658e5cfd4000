"""Grammars: requests wait here until their grammar is compiled."""

import importlib.util
from collections.abc import Sequence

from openinfer.frontend.contract import Rejected, Request, TokenTable
from openinfer.frontend.errors import Unsupported
from openinfer.graph.runner import Sampling
from openinfer.recipes.engine.gates import full
from openinfer.sampler.constraint import Constraint, PendingGrammars
from openinfer.sampler.form import Grammar
from openinfer.sampler.grammar import Compiler
from openinfer.scheduler import Seq


class Grammars:
    """A Gate. It refuses all grammars until `take_tokens` gives it the tokens of the model."""

    possible = importlib.util.find_spec("llguidance") is not None
    """Whether openinfer-sampler[grammar] is installed."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], max_queued: int) -> None:
        self._vocab_size, self._eos_token_ids, self._max_queued = vocab_size, eos_token_ids, max_queued
        self._table: TokenTable | None = None
        self._pending: PendingGrammars[Seq[Sampling]] | None = None
        self._grammars: dict[int, Grammar] = {}

    def __len__(self) -> int:
        return len(self._pending or ())

    def take_tokens(self, table: TokenTable) -> None:
        """Get ready for grammars over these tokens. Raises Unsupported."""
        if table == self._table:
            return  # from another frontend of the same model
        if not self.possible or self._table is not None:
            raise Unsupported(
                "this engine takes no TokenTable: it has another, or openinfer-sampler[grammar] is missing"
            )
        self._table, vocab = table, self._vocab_size
        special_ids = [token for token in table.special_ids if token < vocab]
        eos, tokenizer = self._eos_token_ids, table.definition
        compiler = Compiler(table.tokens[:vocab], special_ids, eos, vocabulary=vocab, tokenizer=tokenizer)
        self._pending = PendingGrammars(compiler)

    def refusal(self, request: Request, waiting: int) -> Rejected | None:
        if request.grammar is None:
            return None
        if self._pending is None:
            why = "grammars need a TokenTable, which this engine was not given"
            return Rejected(request.id, why, "unsupported")
        return full(request, waiting, self._max_queued)

    def admit(self, request: Request) -> None:
        if request.grammar is not None:
            self._grammars[request.id] = request.grammar

    def take(self, seq: Seq[Sampling]) -> bool:
        grammar = self._grammars.pop(seq.id, None)
        if grammar is None or self._pending is None:
            return False
        self._pending.start(seq.id, seq, grammar)
        return True

    def ready(self, wait_s: float) -> Sequence[Seq[Sampling] | Rejected]:
        found: list[Seq[Sampling] | Rejected] = []
        for _, seq, matcher, problem in self._pending.ready(wait_s) if self._pending else ():
            if matcher is None:
                found.append(Rejected(seq.id, problem, "grammar"))
                continue
            allowed = seq.owner.params.allowed_token_ids
            seq.owner.constraint = Constraint(matcher, allowed, self._vocab_size)
            found.append(seq)
        return found

    def drop(self, request_id: int) -> bool:
        return self._pending is not None and self._pending.drop(request_id)

    def end(self, seq: Seq[Sampling]) -> None:
        self._grammars.pop(seq.id, None)

    def close(self) -> None:
        """Stop the compiler."""
        if self._pending is not None:
            self._pending.close()
