"""Cost models: the time of a step as a function of its work; LinearCost is fitted to measured steps."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..errors import InvalidSetup


class StepWork(NamedTuple):
    """The work of a step."""

    decode_rows: int
    decode_context: int
    """Sum over decode rows of the tokens that they attend to."""
    prefill_tokens: int
    prefill_context: int
    """Tokens that prompt tokens attend to, themselves included: n * m + n * (n + 1) / 2 for a chunk of n after m."""
    drafts: int = 0
    """Drafts that decode rows verify: tokens besides one for each row."""


CostModel: TypeAlias = Callable[[StepWork], float]
"""Seconds of a step."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds: a constant, and a factor for each kind of work. The defaults fit a dense model of 4 billion
    parameters in bf16 on an H200 roughly. Use fit() with measured steps for figures to rely on."""

    step: float = 2.0e-3
    decode_row: float = 2.4e-5
    decode_context: float = 1.9e-8
    prefill_token: float = 1.15e-5
    prefill_context: float = 6.0e-10

    def __call__(self, work: StepWork) -> float:
        return (
            self.step
            + self.decode_row * (work.decode_rows + work.drafts)
            + self.decode_context * work.decode_context
            + self.prefill_token * work.prefill_tokens
            + self.prefill_context * work.prefill_context
        )

    @classmethod
    def fit(cls, records: Iterable[tuple[StepWork, float]]) -> "LinearCost":
        """The model with the least relative squared error over measured (work, seconds), without negative factors.
        Drafts are left out. Work that does not vary over the records gets the factor 0. Raises InvalidSetup if there is
        no record or a time is not positive."""
        rows = [([1.0, *work[:4]], seconds) for work, seconds in records]
        if not rows or any(seconds <= 0 for _, seconds in rows):
            raise InvalidSetup(f"a cost is fitted to steps of positive seconds, given {len(rows)} records")
        # Divided by the time, so that errors are relative; by the largest, so that columns are of one size.
        scale = [max(abs(row[i]) for row, _ in rows) or 1.0 for i in range(5)]
        matrix = [[x / s / seconds for x, s in zip(row, scale, strict=True)] for row, seconds in rows]
        columns = list(range(5))
        while columns:
            solution = _least_squares([[row[i] for i in columns] for row in matrix])
            least = min(range(len(columns)), key=lambda k: solution[k])
            if solution[least] >= 0:
                break
            del columns[least]
        found = dict(zip(columns, solution, strict=True))
        return cls(*(found.get(i, 0.0) / scale[i] for i in range(5)))

    @classmethod
    def load(cls, path: str | Path) -> "LinearCost":
        """Fit to a JSON file: a list of {"decode_rows", "decode_context", "prefill_tokens", "prefill_context",
        "seconds"}. Raises InvalidSetup, OSError."""
        try:
            records, names = json.loads(Path(path).read_text()), StepWork._fields[:4]
            return cls.fit(
                (StepWork(*(int(one[name]) for name in names)), float(one["seconds"])) for one in records
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise InvalidSetup(f"{path} is not a list of measured steps: {error!r}") from error

    def errors(self, records: Iterable[tuple[StepWork, float]]) -> list[float]:
        """Prediction over measurement, less 1, for each record."""
        return [self(work) / seconds - 1 for work, seconds in records]

    def __str__(self) -> str:
        return "step {:.3g} s + row {:.3g} + context {:.3g} + prompt {:.3g} + its context {:.3g}".format(
            *astuple(self)
        )


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float]:
    """x with rows @ x as near to 1 as possible: normal equations, Gauss-Jordan. A dependent column gets 0."""
    size = len(rows[0])
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)]
        for i in range(size)
    ]
    scale = max(table[i][i] for i in range(size))
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(table[i][k]))
        value = table[pivot][k]
        if abs(value) < 1e-12 * scale:
            table[k] = [0.0] * (size + 1)  # its column depends on those before it
            continue
        table[k], table[pivot] = table[pivot], table[k]
        table[k] = [x / value for x in table[k]]
        for i in range(size):
            if i != k and table[i][k]:
                factor = table[i][k]
                table[i] = [x - factor * y for x, y in zip(table[i], table[k], strict=True)]
    return [table[k][size] if table[k][k] else 0.0 for k in range(size)]
