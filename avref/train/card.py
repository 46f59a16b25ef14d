"""The card of a trained drafter: its data, its command, its minutes, and how often its drafts are accepted."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from avref import profiling
from avref.files import write_text
from avref.llm import LLM
from avref.plot_style import new_figure
from avref.train.data import Sequences
from avref.train.loop import Settings

SAMPLES = (
    "on the target's own samples for the shipped evaluation prompts (temperature 1, {prompts} prompts a workload, "
    "{tokens} tokens each); none of these prompts was trained on"
)


def count_tokens(data: Sequences, name: str) -> str:
    """ "N answers (M tokens)", for a card."""
    tokens = sum(len(i) - n for i, n in zip(data.ids, data.prompt_lengths, strict=True))
    return f"{len(data):,} {name} ({tokens:,} tokens)"


def write(
    folder: Path,
    llm: LLM,
    method: str,
    settings: Settings,
    curve: list[dict[str, Any]],
    held_out: dict[str, dict[str, list[float]]],
    *,
    data: str,
    command: str,
    prompts: int,
    tokens: int,
) -> None:
    """Write `card.md`, `held_out.json`, `curve.json` and `curve.png` beside the weights in `folder`.

    held_out: top-p -> workload -> acceptance probability by position; curve: what `loop.train` wrote.
    """
    machine = profiling.describe(llm)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    depth = len(next(iter(next(iter(held_out.values())).values())))
    lines = [
        f"# {method} drafter for {llm.name}",
        "",
        f"- Data: {data}. No evaluation prompt is among them.",
        f"- Command: `{command}`",
        f"- Training: {curve[-1]['step']} steps of {settings.sequences} x {settings.blocks} blocks, "
        f"{curve[-1]['minutes']:.0f} minutes on {machine['threads']} threads of {machine['device']}, float32, seed "
        f"{settings.seed}",
        f"- Size: {size:.1f} MB in bfloat16; embedding and head rows are the target's own and are not in the file.",
        f"- Settings: `{json.dumps(asdict(settings), default=str)}`",
        "",
        "Probability that the draft at each position is accepted, sum(min(p, q)), given that those before it were, "
        + SAMPLES.format(prompts=prompts, tokens=tokens)
        + ":",
        "",
    ]
    for top_p, rows in held_out.items():
        lines += [f"Top-p {top_p}:", "", "| workload | " + " | ".join(str(k + 1) for k in range(depth)) + " |"]
        lines += ["|---" * (depth + 1) + "|"]
        lines += [f"| {name} | " + " | ".join(f"{x:.3f}" for x in row) + " |" for name, row in rows.items()] + [""]
    write_text(folder / "card.md", "\n".join(lines))
    write_text(folder / "held_out.json", json.dumps(held_out, indent=1) + "\n")
    write_text(folder / "curve.json", json.dumps(curve, indent=1) + "\n")
    figure, (axes,) = new_figure(size=(6.0, 3.4))
    for k in sorted({0, 1, 3, depth - 1} & set(range(depth))):
        axes.plot([c["step"] for c in curve], [c["overlap"][k] for c in curve], label=f"position {k + 1}")
    axes.set(xlabel="training step", ylabel="overlap sum(min(p, q)), held out", title=f"{method} distillation")
    axes.legend()
    figure.savefig(folder / "curve.png", dpi=120)
