"""openinfer.graph.runner: a model behind the scheduler's loop. Needs openinfer-graph[runner]."""

from openinfer.graph.runner.batch import Batch, StepRows
from openinfer.graph.runner.model import Constraint, Masks, Model, States
from openinfer.graph.runner.runner import Payload, Runner, Sampling, readback_bytes, segments
from openinfer.graph.runner.scoring import PromptScore, Scores

__all__ = [
    "Batch",
    "Constraint",
    "Masks",
    "Model",
    "Payload",
    "PromptScore",
    "Runner",
    "Sampling",
    "Scores",
    "States",
    "StepRows",
    "readback_bytes",
    "segments",
]
