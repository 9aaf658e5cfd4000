"""Targets and what was reached, as the tables of README.md: `python benchmarks/table.py` prints them, --write puts them
between the README's marks, and what was measured of vLLM too into the tables of docs/comparison.md and ../README.md.

Results lie in results/MODEL/*.json as `openinfer bench ... --json` wrote them (results/host/ for `bench host`); of a
figure that several hold, the newest counts. targets.json has a row a figure: the table, the yardstick, the point, the
metric, and where known what vLLM needs, the floor, what must be and what is hoped for. "front": it is in ../README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
NAMES = {"qwen3-4b": "Qwen3-4B", "qwen3-8b": "Qwen3-8B", "qwen3_5-4b": "Qwen3.5-4B"}
MARKS = re.compile(r"(<!-- table -->\n).*(<!-- end of table -->)", re.DOTALL)


def figures(folder: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The result and its file, by model, yardstick and point."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    files = [(json.loads(path.read_text()), path) for path in sorted(folder.glob("*/*.json"))]
    for data, path in sorted(files, key=lambda item: item[0]["date"]):
        run = {"file": path, "gpu": data["gpu"], "measured": _measured(data)}
        for result in data["results"]:
            found[path.parent.name, data["bench"], _point(data["bench"], result)] = {**result, **run}
        if data.get("server"):
            found[path.parent.name, data["bench"], "server"] = {**data["server"], **run}
    return found


def _measured(data: dict[str, Any]) -> str:
    """The day of a run, and its commit where the file names one."""
    commit = re.match("[0-9a-f]{7}", data.get("commit") or "")
    return data["date"][:10] + (f", {commit[0]}" if commit else "")


def _point(bench: str, result: dict[str, Any]) -> str:
    if bench == "serve":
        limit = f" x{result['max_concurrency']}" if result["max_concurrency"] else ""
        rate = result["request_rate"]
        return f"{rate if rate == 'inf' else format(rate, 'g')}{limit} {result['input_len']}"
    return str(result.get("point") or result.get("what") or result.get("key"))


def reached(result: dict[str, Any] | None, row: dict[str, Any]) -> float:
    """The figure of a row, NaN where it was not measured. `metric` may name a figure in a figure: ttft_ms.p50."""
    value: Any = result
    for name in row["metric"].split("."):
        value = value.get(name) if value else None
    return math.nan if value is None else float(value) * row.get("scale", 1.0)


def tables(targets: list[dict[str, Any]], folder: Path) -> str:
    """Markdown: a table for each name in the targets' "table"."""
    found = figures(folder)
    parts: list[str] = []
    for name in dict.fromkeys(row["table"] for row in targets):
        parts.append(f"### {name}\n")
        parts.append(
            "| what | vLLM 0.26.0 | floor | must | stretch | reached | of the must | of the floor | from |"
        )
        parts.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for row in (row for row in targets if row["table"] == name):
            parts.append(_row(row, found.get((name.split()[0], row["bench"], row["point"])), folder))
        parts.append("")
    return "\n".join(parts)


def _row(row: dict[str, Any], result: dict[str, Any] | None, folder: Path) -> str:
    value = reached(result, row)
    known = not math.isnan(value)
    cells = [row["what"], *(_number(row.get(name)) for name in ("vllm", "floor", "must", "stretch"))]
    cells.append(_number(value) if known else "not measured")
    must, floor = row.get("must"), row.get("floor")
    # Above 100 % is better than the target, whether more or less of the figure is better.
    cells.append(f"{value / must if row.get('higher') else must / value:.0%}" if known and must else "")
    cells.append(f"{floor / value:.0%}" if known and floor else "")
    at = result["file"].relative_to(folder.parent).as_posix() if known and result else ""
    cells.append(f"[{result['gpu'] or 'CPU'}, {result['measured']}]({at})" if known and result else "")
    return "| " + " | ".join(cells) + " |"


def beside_vllm(targets: list[dict[str, Any]], folder: Path) -> str:
    """Markdown: one table of all rows that have a figure of vLLM too. A ratio above 1: ours is better.

    A run is named in the first of the rows that it has one after the other.
    """
    found, run = figures(folder), ""
    lines = [
        "| model | what | vLLM 0.26.0 | openinfer | ratio | measured (empty: as above) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in targets:
        result = found.get((row["table"].split()[0], row["bench"], row["point"]))
        value = reached(result, row)
        if result and "vllm" in row and not math.isnan(value):
            ratio = value / row["vllm"] if row.get("higher") else row["vllm"] / value
            model = NAMES[row["table"].split()[0]]
            cells = [model, row["what"], _number(row["vllm"]), _number(value), f"{ratio:.2f}"]
            cells.append("" if result["measured"] == run else result["measured"])
            run = result["measured"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the tables into README.md")
    args = parser.parse_args()
    targets, results = json.loads((HERE / "targets.json").read_text()), HERE / "results"
    texts = {
        HERE / "README.md": tables(targets, results),
        ROOT / "docs/comparison.md": beside_vllm(targets, results),
        ROOT / "README.md": beside_vllm([row for row in targets if row.get("front")], results),
    }
    for path, text in texts.items():
        if args.write:
            path.write_text(MARKS.sub(rf"\g<1>\n{text}\n\g<2>", path.read_text()))
        elif path.parent == HERE:
            print(text)


if __name__ == "__main__":
    main()
