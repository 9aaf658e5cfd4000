"""The batch on the device, and captured steps over it."""

from openinfer.graph.buckets import Buckets, Shape
from openinfer.graph.costs import StepCosts
from openinfer.graph.errors import FieldError, GraphError, MissingExtra, NotPossible, RingFull, UnknownStep
from openinfer.graph.pace import StepPace
from openinfer.graph.readback import Readback
from openinfer.graph.rows import Delta, Field, Rows
from openinfer.graph.steps import StepGraphs, bucket_for
from openinfer.graph.watch import Finding, NoWatch, Watch
from openinfer.graph.watch.loads import SlowLoads
from openinfer.graph.watch.trace import NoTrace, StepTrace

__all__ = [
    "Buckets", "Delta", "Field", "FieldError", "Finding", "GraphError", "MissingExtra", "NoTrace", "NoWatch",
    "NotPossible", "Readback", "RingFull", "Rows", "Shape", "SlowLoads", "StepCosts", "StepGraphs",
    "StepPace", "StepTrace", "UnknownStep", "Watch", "bucket_for",
]  # fmt: skip
