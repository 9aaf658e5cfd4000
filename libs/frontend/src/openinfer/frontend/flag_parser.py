"""A parser of flags that speaks in one line: no usage before an error, the flag that was meant, a file of flags."""

import argparse
import copy
import json
import math
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from openinfer.frontend.errors import one_line
from openinfer.frontend.flag_types import number, tokens
from openinfer.frontend.vllm_flags import VLLM_FLAGS

NOT_POSSIBLE = "not possible: "
"""The help of a flag that a model cannot have begins so; the reason follows."""
FLAG_WIDTH = 32
"""Columns of a flag in help texts."""


class FlagParser(argparse.ArgumentParser):
    """Flags and one positional argument in any order. Abbreviations are refused: a flag is one word for good."""

    def __init__(self, prog: str, **given: Any) -> None:
        super().__init__(prog, allow_abbrev=False, formatter_class=_Help, **given)
        self.add_argument("--help-engine", action=_EngineHelp, nargs=0, help=argparse.SUPPRESS)
        self.register("type", float, _finite)

    def format_help(self, *, engine: bool = False) -> str:
        """The help text without the flags of an engine, which would be half of it; engine: these alone."""
        groups = self._action_groups
        theirs = [group for group in groups if (group.title or "").startswith("engine")]
        self._action_groups = theirs if engine else [group for group in groups if group not in theirs]
        try:
            text = super().format_help()
        finally:
            self._action_groups = groups
        if engine or not theirs:
            return text
        return f"{text}\n--help-engine lists the flags of the engine: memory, batches, cache, ranks, adapters, drafts\n"

    def error(self, message: str) -> NoReturn:
        """One line on stderr, and exit code 2."""
        self.exit(2, f"{self.prog}: error: {one_line(message)} ({self.prog} --help)\n")

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse, with the words of --config FILE before the others. Ends the process for wrong arguments."""
        found, unknown = self.parse_known_args(self.with_config(args), namespace)
        self.refuse(unknown)
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices: the message has the flag's help, which explains them."""
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            why = (action.help or "").replace("%(default)s", str(action.default)).strip()
            raise argparse.ArgumentError(action, f"{value} is not one of {allowed}{why and f' ({why})'}")

    def refuse(self, unknown: Sequence[str]) -> None:
        """End the process where there is a word that no argument takes. The line names all of them."""
        if not unknown:
            return
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        advised = {flag: text for flag in flags if (text := self._advice(flag))}
        others = [word for word in unknown if word.partition("=")[0] not in advised]
        told = [f"{flag} is a flag of vLLM that openinfer does not have: {advised[flag]}" for flag in advised]
        if len(advised) > 1:
            each = "; ".join(f"{flag} ({text})" for flag, text in advised.items())
            told = [f"flags of vLLM that openinfer does not have: {each}"]
        # Words without a flag are values of advised ones.
        if not advised or any(word in flags for word in others):
            known = [name for name in self._option_string_actions if name.startswith("--")]
            strange = [flag for flag in flags if flag not in advised]
            close = [name for flag in strange for name in get_close_matches(flag, known, n=1)]
            hint = f"; did you mean {' '.join(close)}?" if close else ""
            told.append(f"unrecognized arguments: {' '.join(strange if advised else unknown)}{hint}")
        self.error("; ".join(told))

    def _advice(self, flag: str) -> str | None:
        """The flag or field to use instead of a flag of vLLM. None: vLLM has no flag of that name."""
        name = "-O" if flag.startswith("-O") else flag.partition(".")[0].replace("_", "-")
        positive = name.replace("--no-", "--", 1)
        if name != positive and positive in self._option_string_actions:
            return "it is the default; leave it out"
        if name != flag and name in self._option_string_actions:
            return f"give all of {name} in one JSON text"
        return VLLM_FLAGS.get(positive)

    def position(self, args: Sequence[str]) -> int | None:
        """Where the first word is that is neither a flag nor a flag's value. Ends the process for an unknown flag."""
        rest = 0  # values that may still come
        for place, word in enumerate(args):
            if not word.startswith("-"):
                if not rest:
                    return place
                rest -= 1
                continue
            flag, has_value, _ = word.partition("=")
            if flag not in self._option_string_actions:
                self.refuse([one for one in args[place:] if one.startswith("-") and not self._takes(one)])
            rest = 0 if has_value else _values(self._option_string_actions[flag])
        return None

    def _takes(self, word: str) -> bool:
        """Whether a word that begins with a dash is a flag of this parser, or a negative number."""
        return word.partition("=")[0] in self._option_string_actions or word[1:2].isdigit()

    def with_config(self, args: Sequence[str]) -> list[str]:
        """The words of the file that --config names, then the others, which count for more. Flags have dashes for the
        underscores that users of vLLM may write."""
        args = [_dashed(word) for word in args]
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", type=Path)
        if "--config" not in self._option_string_actions:
            return list(args)
        found, rest = finder.parse_known_args(args)
        if found.config is None:
            return rest
        try:
            table = tomllib.loads(found.config.read_text())
        except (OSError, ValueError, RecursionError) as error:
            self.error(f"--config {found.config}: {error}; it is TOML, a line a flag: max-model-len = 8192")
        model = str(table.pop("model", ""))
        words = [word for name, value in table.items() for word in self._words(name, value)]
        return [*words, *rest] if not model or self.position(rest) is not None else [model, *words, *rest]

    def _words(self, name: str, value: object) -> Iterable[str]:
        flag = "--" + name.replace("_", "-")
        action = self._option_string_actions.get(flag)
        if action is None:
            self.refuse([flag])
        elif isinstance(value, dict):
            self.error(f"--config: {name} is a table; write every flag on a line of its own")
        elif isinstance(value, bool) and action.nargs == 0:
            negative = "--no-" + flag[2:]
            if value or negative in self._option_string_actions:
                return [flag if value else negative]
            return []
        elif isinstance(value, list):
            return [flag, *map(str, value)] if action.nargs == "+" else [f"{flag}={json.dumps(value)}"]
        return [f"{flag}={value}"]


def merge(parser: FlagParser, others: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the flags of several parsers to one, each once: its help says for which of them it differs, or is not
    possible. The reason is in the help of that parser alone."""
    group = parser.add_argument_group("engine")
    found: dict[str, dict[str, argparse.Action]] = {}
    for name, other in others.items():
        for action in other._actions:
            if action.option_strings:
                found.setdefault(action.option_strings[0], {})[name] = action
    for actions in found.values():
        owners: dict[str, list[str]] = {}
        for name, action in actions.items():
            owners.setdefault(str(action.help), []).append(name)
        refused = [name for text in owners if text.startswith(NOT_POSSIBLE) for name in owners[text]]
        texts = [text for text in owners if not text.startswith(NOT_POSSIBLE)] or [*owners]
        usual, *rest = sorted(texts, key=lambda text: len(owners[text]), reverse=True)
        only = f"only {', '.join(actions)}: " if len(actions) < len(others) else ""
        shown = copy.copy(actions[owners[usual][0]])
        shown.help = only + usual + "".join(f"; {', '.join(owners[text])}: {text}" for text in rest)
        if texts != [*owners]:
            shown.help += f"; not {', '.join(sorted(refused))}"
        group._add_action(shown)


class _EngineHelp(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        parser.exit(0, parser.format_help(engine=True))


def _dashed(word: str) -> str:
    """A flag with dashes for underscores. Other words are unchanged, and so are flags in one word with their values."""
    name, equals, value = word.partition("=")
    is_flag = name.startswith("--") and not any(map(str.isspace, name))
    return name.replace("_", "-") + equals + value if is_flag else word


def _values(action: argparse.Action) -> int:
    """How many words a flag takes at most."""
    if action.nargs is None:
        return 1
    return action.nargs if isinstance(action.nargs, int) else 1 << 30


def _finite(text: str) -> float:
    """A number that JSON has, because flags travel to the engine so."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


class _Help(argparse.RawDescriptionHelpFormatter):
    """Defaults in brackets where there is one to tell, short names of values, lines of 100 characters."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        super().__init__(prog, max_help_position=FLAG_WIDTH, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0][2:]}"
        return super()._format_action_invocation(action)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "+":
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = "default" in (action.help or "")
        if isinstance(action, argparse.BooleanOptionalAction) and not told:
            return f"{action.help}; default: {'on' if action.default else 'off'}"
        told = told or not action.default or action.nargs == 0
        if told or isinstance(action.default, list) or not action.option_strings:
            return action.help
        return f"{action.help} (default: %(default)s)"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kinds: dict[object, str] = {int: "N", number: "N", tokens: "N", float: "X"}
        return kinds.get(action.type, "TEXT")
