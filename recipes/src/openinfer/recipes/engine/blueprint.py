"""Blueprint: the model that a recipe makes of one checkpoint, with all code that depends on the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from openinfer.graph.runner import Model
from openinfer.kernels import NullPack
from openinfer.kernels.authoring import CacheForm
from openinfer.kvpool import Eviction, Group, Lru
from openinfer.recipes.engine.config_fields import ModelConfig
from openinfer.recipes.engine.engine import Engine
from openinfer.recipes.engine.limits import Limits, Room
from openinfer.recipes.engine.verdict import Check, Reference
from openinfer.tensor import Arena, Checkpoint, LoadReport, Stream, Tensor

M = TypeVar("M", bound=Model)


@dataclass(frozen=True, slots=True)
class Control:
    """A negative control of the accuracy gate: the tensors in `changes` get wrong values, and the gate must fail.
    min_tokens: only prompts of at least this many tokens show the fault."""

    name: str
    changes: Sequence[tuple[Tensor, np.ndarray[Any, Any]]]
    min_tokens: int = 0


class Blueprint(ABC, Generic[M]):
    """A model before it has memory. It touches no device by itself; `lay_out` takes memory from the arena it is given.

    `blocks`: blocks of each group of the pool, the padding block included.
    """

    config: ModelConfig
    cache_forms: ClassVar[Collection[CacheForm]] = ()
    """Forms of the cache that the model can have (--kv-cache-dtype) besides numbers of its own dtype."""

    @property
    def mixture(self) -> bool:
        """Whether tokens choose among experts."""
        return False

    @property
    def trained_drafts(self) -> int:
        """Drafts of a row for which its layers that draft were trained, if they were for a number."""
        return 0

    @property
    @abstractmethod
    def page_size(self) -> int:
        """Tokens of an entry of a block table."""

    @abstractmethod
    def decode_rows(self, max_rows: int) -> Iterable[int]:
        """Sizes of decode steps that deserve a recording of their own."""

    @abstractmethod
    def validate(self, checkpoint: Checkpoint, limits: Limits) -> None:
        """Raise CheckpointError unless the checkpoint holds exactly the tensors that the model takes."""

    @abstractmethod
    def share(self, limits: Limits, room: Room) -> Sequence[int]:
        """Blocks of each group in this room. Raises room.refusal(...) where they are too few to run one sequence."""

    @abstractmethod
    def groups(self, limits: Limits, blocks: Sequence[int] | None = None) -> list[Group]:
        """The pool's groups. None: the smallest ones, for a plan."""

    def eviction(self, group: Group) -> Eviction:
        """The order in which cached blocks of a group are evicted: the least recently used first."""
        return Lru(group)

    @abstractmethod
    def lay_out(self, arena: Arena, stream: Stream, limits: Limits, blocks: Sequence[int]) -> M:
        """Take all memory of the model from the arena: weights, tables, batch, buffers and cache. Weights are not
        initialised. The cache is zeroed, because a kernel may multiply elements that no sequence wrote by zero."""

    @abstractmethod
    def cache(self, model: M) -> Sequence[Sequence[Tensor]]:
        """The tensors that hold the blocks of each group of the pool; their first axis is the block."""

    @property
    def cache_is_alike(self) -> bool:
        """Whether the ranks of a model hold all of its cache, each the same; else each holds a part."""
        return False

    @abstractmethod
    def load(
        self, model: M, checkpoint: Checkpoint, stream: Stream, progress: Callable[[int, int], None]
    ) -> LoadReport:
        """Fill the weights. Raises what load_tensors does."""

    @abstractmethod
    def traced(self, model: M, pack: NullPack) -> M:
        """The model with one layer of each kind, which counts for all of that kind (kernels.Repeated). Layers of a kind
        differ in addresses only, so one trace stands for them."""

    @abstractmethod
    def memory(self, model: M) -> Mapping[str, int]:
        """Bytes of the model by their use, without the batch and the cache."""

    @abstractmethod
    def controls(self, model: M) -> Iterable[Control]:
        """Faults that the accuracy gate must notice, each as a model made wrong."""

    def notices(self, fault: str) -> bool:
        """Whether the gate can notice a fault with these options: the name of a control or of a wrong table."""
        return True

    def comparable(self, references: Sequence[Reference]) -> Sequence[Reference]:
        """The references that an engine with these options is compared with."""
        return references

    def checks(
        self, engine: Engine, references: Sequence[Reference], wrong_table: str | None = None
    ) -> Iterable[Check]:
        """The gate's checks besides log-probabilities. wrong_table: see Forced."""
        return ()
