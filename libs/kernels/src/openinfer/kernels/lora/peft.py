"""A LoRA adapter as PEFT writes it: a folder with adapter_config.json and adapter_model.safetensors.

The values of an adapter are two matrices and a scale for each projection that it changes. Settings that change what is
computed, and that are not supported, are refused by name.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from openinfer.kernels.errors import InvalidAdapter
from openinfer.tensor import Checkpoint, CheckpointError, dtypes

Array = np.ndarray[Any, Any]
N = TypeVar("N", int, float)
Patterns = Mapping[re.Pattern[str], N]
"""Numbers of the modules whose whole names a pattern matches."""
CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
MAX_ALPHA = 1e9
MAX_PATTERNS = 4096  # each is compared with each module of the model
PREFIX = "base_model.model."
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
}
"""Settings that are supported with these values only."""
OTHER_BASES = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways of initialising that change the weights of the base model too."""
_NAME = re.compile(r"\^?(\w|\\?\.)+")
"""A pattern of modules: the end of a name. Other regular expressions may take forever, so they are refused."""


class LowRank(NamedTuple):
    """The change of a module's weight by an adapter: scale * B @ A. A [r, K] and B [N, r] have any dtype of weights."""

    a: Array
    b: Array
    scale: float


class _Settings(NamedTuple):
    """alpha and rank of the modules that no pattern names, and of those that one names. targets: names of modules; None
    where the tensors say which modules are changed."""

    rank: int
    alpha: float
    ranks: Patterns[int]
    alphas: Patterns[float]
    root: bool
    targets: Collection[str] | None

    def rank_of(self, module: str) -> int:
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """PEFT's scale, of rsLoRA where `root`."""
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.root else rank)


def text_module(name: str) -> str:
    """A module's name without what a model with a vision tower has before the text model."""
    return name.replace("model.language_model.", "model.", 1)


def read_peft(
    folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int, unused: tuple[str, ...] = ()
) -> dict[str, LowRank]:
    """The adapter in `folder`, by module. shapes: rows and columns of each projection of the model, by module. unused:
    beginnings of modules that the checkpoint may have and that are not run; an adapter may change these too.

    Raises InvalidAdapter for settings that are not supported, damaged files and a rank above max_rank. The same for
    modules or shapes that the model has not, missing matrices and values that are not finite.
    """
    config = _read_config(folder)
    settings = _settings(folder, config, max_rank)
    if (folder / PICKLED).is_file() and not (folder / TENSORS).exists():
        raise InvalidAdapter(
            f"adapter {folder}: {PICKLED} is a pickle, which can run code; save {TENSORS} with safe_serialization"
        )
    try:
        with Checkpoint(folder, TENSORS) as checkpoint:
            return _matrices(folder, checkpoint, settings, shapes, unused)
    except CheckpointError as error:
        raise InvalidAdapter(f"adapter {error}") from None


def _read_config(folder: Path) -> Mapping[str, Any]:
    path, raw = folder / CONFIG, None
    try:
        if path.is_file():  # a FIFO would be waited for
            with open(path, "rb") as file:
                raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InvalidAdapter(f"adapter {path}: cannot be read: {error.strerror}") from None
    if raw is None:
        raise InvalidAdapter(f"adapter {folder}: there is no {CONFIG}; give the folder that PEFT saved")
    if len(raw) > MAX_CONFIG_BYTES:
        raise InvalidAdapter(f"adapter {path}: is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapter(f"adapter {path}: is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidAdapter(f"adapter {path}: must be a JSON object")
    return config


def _settings(folder: Path, config: Mapping[str, Any], max_rank: int) -> _Settings:
    def refuse(key: str, allowed: str) -> InvalidAdapter:
        shown = repr(config.get(key))[:80]
        return InvalidAdapter(f"adapter {folder / CONFIG}: {key} is {shown}; {allowed}")

    def rank(key: str, value: object) -> int:
        if type(value) is not int or value < 1:
            raise refuse(key, "a rank must be an integer from 1 on")
        if value > max_rank:
            raise refuse(key, f"--max-lora-rank is {max_rank}; raise it")
        return value

    def alpha(key: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < MAX_ALPHA:
            raise refuse(key, f"alpha must be a number of magnitude below {MAX_ALPHA:g}")
        return value

    def patterns(key: str, number: Callable[[str, object], N]) -> Patterns[N]:
        given = config.get(key) or {}
        if not isinstance(given, dict) or len(given) > MAX_PATTERNS or not all(map(_NAME.fullmatch, given)):
            raise refuse(key, f"it must be an object of names of modules, at most {MAX_PATTERNS}")
        return {re.compile(rf"(.*\.)?({k})"): number(key, value) for k, value in given.items()}

    if config.get("peft_type") != "LORA":
        raise refuse("peft_type", "only 'LORA' is supported")
    for key, allowed in UNSUPPORTED.items():
        if config.get(key) not in allowed:
            raise refuse(key, "this is not supported; merge the adapter into a checkpoint")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(OTHER_BASES):
        raise refuse(
            "init_lora_weights", "it changes the base model too; merge the adapter into a checkpoint"
        )
    targets = config.get("target_modules")
    if isinstance(targets, list) and targets and all(isinstance(one, str) for one in targets):
        if any(config.get(key) for key in ("layers_to_transform", "exclude_modules")):
            targets = None
    elif isinstance(targets, str):
        targets = None
    else:
        raise refuse("target_modules", "it must be a list of names")
    return _Settings(
        rank("r", config.get("r")),
        alpha("lora_alpha", config.get("lora_alpha")),
        patterns("rank_pattern", rank),
        patterns("alpha_pattern", alpha),
        root=bool(config.get("use_rslora")),
        targets=targets,
    )


def _first(patterns: Patterns[N], module: str, usual: N) -> N:
    """The value of the first pattern that the whole name matches, as PEFT takes it."""
    return next((value for one, value in patterns.items() if one.fullmatch(module)), usual)


def _matrices(
    folder: Path,
    checkpoint: Checkpoint,
    settings: _Settings,
    shapes: Mapping[str, tuple[int, int]],
    unused: tuple[str, ...],
) -> dict[str, LowRank]:
    spelled = _spelled(folder, checkpoint)
    modules = {module for module in spelled if not module.startswith(unused)}
    wanted = modules
    if settings.targets is not None:
        wanted = set(_modules_of(folder, settings.targets, shapes, spelled.keys() - modules))
    if unknown := sorted(modules - shapes.keys()):
        raise InvalidAdapter(
            f"adapter {folder}: {unknown[0]} is no projection of this model that can be adapted "
            f"(one of {len(unknown)}); it is for another base model, or changes embeddings, head or experts"
        )
    if surplus := sorted(modules - wanted):
        raise InvalidAdapter(f"adapter {folder}: {surplus[0]} is not among its target_modules")
    if not wanted:
        raise InvalidAdapter(f"adapter {folder}: it changes no projection")
    found = {}
    for module in sorted(wanted):
        rows, columns = shapes[module]
        published, names = spelled.get(module, (module, {}))
        if missing := {"A", "B"} - names.keys():
            raise InvalidAdapter(f"adapter {folder}: {module} has no lora_{min(missing)}")
        rank = settings.rank_of(published)
        found[module] = LowRank(
            _values(checkpoint, names["A"], (rank, columns)),
            _values(checkpoint, names["B"], (rows, rank)),
            settings.scale_of(published),
        )
    return found


def _spelled(folder: Path, checkpoint: Checkpoint) -> dict[str, tuple[str, dict[str, str]]]:
    """By module: its name as published, and the names of its tensors by "A" and "B"."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for name in checkpoint.names:
        match = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", name)
        if match is None:
            raise InvalidAdapter(
                f"adapter {folder}: tensor {name!r} is not one that can be run; names are "
                f"{PREFIX}MODULE.lora_A.weight and .lora_B.weight"
            )
        _, names = found.setdefault(text_module(match[1]), (match[1], {}))
        if match[2] in names:
            raise InvalidAdapter(f"adapter {folder}: {names[match[2]]!r} and {name!r} are of the same module")
        names[match[2]] = name
    return found


def _modules_of(
    folder: Path, targets: Collection[str], shapes: Mapping[str, Any], unused: Collection[str]
) -> Iterator[str]:
    """The modules that PEFT takes for a list of names: those that have one of them as their last parts. A name may be
    one of unused modules alone."""
    for target in targets:

        def named(module: str, target: str = target) -> bool:
            return module == text_module(target) or module.endswith(f".{target}")

        found = [module for module in shapes if named(module)]
        if not found and not any(map(named, unused)):
            raise InvalidAdapter(
                f"adapter {folder}: target_modules has {target!r}, which no projection of this model is called"
            )
        yield from found


def _values(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> Array:
    info = checkpoint.info(name)
    if info.shape != shape:
        raise CheckpointError(
            info.file, name, f"has shape {list(info.shape)}, and the model takes {list(shape)}"
        )
    if info.dtype not in dtypes.WEIGHTS:
        names = ", ".join(dtype.name for dtype in dtypes.WEIGHTS)
        raise CheckpointError(info.file, name, f"is {info.dtype.name}; {names} are possible")
    raw = np.empty(info.nbytes, np.uint8)
    # Not mapped: a file that is written anew meanwhile would end this process.
    checkpoint.read_into(name, raw)
    values = raw.view(info.dtype).reshape(info.shape)
    if not np.isfinite(values).all():
        raise CheckpointError(info.file, name, "has values that are not finite")
    return values
