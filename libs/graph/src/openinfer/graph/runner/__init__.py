"""openinfer.graph.runner: a model behind the scheduler's loop. Needs openinfer-graph[runner]."""

try:
    from openinfer.graph.runner.batch import Batch, StepRows
    from openinfer.graph.runner.model import Constraint, Masks, Model, States
    from openinfer.graph.runner.runner import Payload, Runner, Sampling, readback_bytes, segments
    from openinfer.graph.runner.scoring import PromptScore, Scores
except ModuleNotFoundError as error:
    if error.name not in ("openinfer.kernels", "openinfer.sampler", "openinfer.scheduler"):
        raise
    from openinfer.graph.errors import MissingExtra

    raise MissingExtra(f"the runner needs {error.name}: pip install 'openinfer-graph[runner]'") from error

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
