"""`python -m avref train dflash`: sample, train, evaluate on held-out samples, write weights and card.

Every stage continues where a stopped run left off.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from avref import profiling
from avref.config import SamplingParams
from avref.drafters import weights
from avref.llm import LLM
from avref.train.data import Recorder, Sequences, build_shards
from avref.train.evaluate import held_out_overlap
from avref.train.loop import Settings, train
from avref.train.prompts import training_prompts

SAMPLING = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=160)


def run(method: str, model: str, output: Path, num_prompts: int = 3000, steps: int | None = None) -> Path:
    """Run all stages and return the folder of the trained drafter.

    It holds `config.json`, `model.safetensors`, `curve.json`, `curve.png`, `held_out.json` and `card.md`. Raises
    ValueError for a method that no training is written for.
    """
    if method != "dflash":
        raise ValueError(f"no training is written for method {method!r}; allowed is 'dflash'")
    settings = Settings() if steps is None else replace(Settings(), steps=steps)
    llm = LLM(model, max_num_seqs=64, dtype="float32")
    llm.model.requires_grad_(False)
    last = llm.model.config.get_text_config().num_hidden_layers
    if max(settings.target_layers) > last:
        layers = tuple(sorted({last // 2, last * 4 // 5, last - 1, last}))
        settings = replace(settings, target_layers=layers)
    recorder = Recorder(settings.target_layers)
    build_shards(llm, recorder, training_prompts(num_prompts), SAMPLING, output / "shards")
    drafter = train(llm.model, Sequences.load(output / "shards"), output, settings)
    weights.save(drafter, output / "out", method, llm.name)
    held_out = {f"{p:g}": held_out_overlap(llm, output / "out", top_p=p) for p in (0.95, 1.0)}
    write_card(output, llm, settings, num_prompts, held_out)
    return output / "out"


def write_card(output: Path, llm: LLM, settings: Settings, num_prompts: int, held_out: dict[str, Any]) -> None:
    """`card.md`, `curve.json` and `curve.png` beside the weights."""
    from avref.plots import new_figure

    folder = output / "out"
    curve = json.loads((output / "curve.json").read_text())
    data = Sequences.load(output / "shards")
    tokens = sum(len(i) - n for i, n in zip(data.ids, data.prompt_lengths, strict=True))
    machine = profiling.describe(llm)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    lines = [
        f"# dflash drafter for {llm.name}",
        "",
        f"- Data: {len(data)} answers ({tokens:,} tokens) sampled from the target itself at temperature 1, top-p 0.95, "
        "to prompts made by `avref.train.prompts` (seed 0). No evaluation prompt is among them.",
        f"- Command: `python -m avref train dflash --model {llm.name} --prompts {num_prompts} "
        f"--steps {settings.steps}`",
        f"- Training: {settings.steps} steps of {settings.sequences} x {settings.blocks} blocks, "
        f"{curve[-1]['minutes']:.0f} minutes on {machine['threads']} thread(s) of {machine['device']}, float32",
        f"- Size: {size:.1f} MB in bfloat16, {settings.num_layers} layer(s), {settings.vocab_size} draft ids, "
        f"blocks of {settings.depth}; embedding and head rows are the target's own.",
        f"- Settings: `{json.dumps(asdict(settings))}`",
        "",
        "Acceptance probability sum(min(p, q)) at each position given that the drafts before it were accepted, on the "
        "target's own samples for the shipped evaluation prompts (40 per workload, 96 tokens, temperature 1):",
        "",
    ]
    for top_p, rows in held_out.items():
        lines += [
            f"top-p {top_p}:",
            "",
            "| workload | " + " | ".join(str(k + 1) for k in range(settings.depth)) + " |",
            "|---" * (settings.depth + 1) + "|",
        ]
        lines += [f"| {name} | " + " | ".join(f"{x:.3f}" for x in row) + " |" for name, row in rows.items()] + [""]
    (folder / "card.md").write_text("\n".join(lines))
    (folder / "held_out.json").write_text(json.dumps(held_out, indent=1) + "\n")
    (folder / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
    figure, (axes,) = new_figure(size=(6.0, 3.4))
    steps = [c["step"] for c in curve]
    for k in (0, 1, 3, 6):
        if k < settings.depth:
            axes.plot(steps, [c["overlap"][k] for c in curve], label=f"position {k + 1}")
    axes.set(xlabel="training step", ylabel="overlap sum(min(p, q)), held out", title="dflash distillation")
    axes.legend()
    figure.savefig(folder / "curve.png", dpi=120)
