"""openinfer.graph.runner: a model behind the scheduler's loop. Needs openinfer-graph[runner]."""

try:
    from openinfer.graph.runner.adapting import AdapterQueue
    from openinfer.graph.runner.batch import Batch, Read, StepRows
    from openinfer.graph.runner.drafting import Drafting, NoDrafts, Proposal
    from openinfer.graph.runner.first_tokens import FirstTokens
    from openinfer.graph.runner.follower import Leader, LoneLeader, follow_leader
    from openinfer.graph.runner.host import HostPack
    from openinfer.graph.runner.model import Constraint, Masks, Model, NoStates, States
    from openinfer.graph.runner.proposing import BlockProposer, Proposer
    from openinfer.graph.runner.ring import Ring, RingReader, Writer
    from openinfer.graph.runner.runner import Payload, Runner
    from openinfer.graph.runner.sampling import Sampling
    from openinfer.graph.runner.scoring import PromptScore, Scores
    from openinfer.graph.runner.segments import readback_bytes, segments, step_keys
    from openinfer.graph.runner.verifying import DraftCounts
    from openinfer.graph.runner.weights_desk import AllRanks, Progress, WeightsDesk
except ModuleNotFoundError as error:
    if error.name not in ("openinfer.kernels", "openinfer.sampler", "openinfer.scheduler"):
        raise
    from openinfer.graph.errors import MissingExtra

    raise MissingExtra(f"the runner needs {error.name}: pip install 'openinfer-graph[runner]'") from error

__all__ = [
    "AdapterQueue",
    "AllRanks",
    "Batch",
    "BlockProposer",
    "Constraint",
    "DraftCounts",
    "Drafting",
    "FirstTokens",
    "HostPack",
    "Leader",
    "LoneLeader",
    "Masks",
    "Model",
    "NoDrafts",
    "NoStates",
    "Payload",
    "Progress",
    "PromptScore",
    "Proposal",
    "Proposer",
    "Read",
    "Ring",
    "RingReader",
    "Runner",
    "Sampling",
    "Scores",
    "States",
    "StepRows",
    "WeightsDesk",
    "Writer",
    "follow_leader",
    "readback_bytes",
    "segments",
    "step_keys",
]
