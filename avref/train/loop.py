"""The training loop, the same for every family: resumable, seeded, with a progress bar and a validation curve."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from avref.evidence.bench_setting import fingerprint
from avref.files import differences, load_tensors, save_tensors, write_text
from avref.train.blocks import Family, loss_and_overlap, make_batch
from avref.train.data import Sequences


@dataclass(frozen=True)
class Settings:
    """One training run: `sequences` x `blocks` blocks in each step.

    The learning rate warms up linearly, then falls along a cosine to a twentieth. The weight of the cross-entropy falls
    along a line to a fifth.
    """

    depth: int = 7
    target_layers: tuple[int, ...] = (0, 8, 16, 24, 29, 30)
    num_layers: int = 1
    intermediate_size: int = 1152
    vocab_size: int = 8192
    steps: int = 8000
    sequences: int = 4
    blocks: int = 32
    short_depth: int = 3
    learning_rate: float = 1.2e-3
    cross_entropy: float = 0.5  # its weight in the loss beside the total variation, at the first step
    warmup: int = 60
    weight_decay: float = 0.1
    dropout: float = 0.1
    top_p: float = 0.95
    seed: int = 0
    checkpoint_every: int = 200
    init: Path | None = None  # a trained drafter whose tensors of the same name and shape are taken over


def learning_rate(s: Settings, step: int) -> float:
    """Learning rate of one step."""
    if step < s.warmup:
        return s.learning_rate * (step + 1) / s.warmup
    progress = (step - s.warmup) / max(1, s.steps - s.warmup)
    return s.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(family: Family, target: Any, data: Sequences, folder: Path, s: Settings, validation: int = 64) -> nn.Module:
    """Train a drafter of a family on all but the last `validation` sequences.

    Continues from `folder/checkpoint.safetensors` when it is there; a run that is killed loses what came after its last
    checkpoint. `steps` may be raised, which stretches the fall of the learning rate and of the cross-entropy's weight
    (`held_out_loss` in the curve keeps the first weight). Raises ValueError for a checkpoint of another run, and for
    too few sequences, RuntimeError for a damaged checkpoint.
    """
    vocabulary = target.get_output_embeddings().weight.shape[0]
    torch.manual_seed(s.seed)
    validation = max(1, min(validation, len(data) // 8))
    count = min(s.vocab_size, vocabulary)
    vocab_ids = data.frequent_ids(count, _ends(target), vocabulary, len(data) - validation)
    model = family.start(target, s, vocab_ids)
    if s.init is not None:
        vocab_ids = _take_over(model, s.init, vocab_ids)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=s.learning_rate, betas=(0.9, 0.95), weight_decay=s.weight_decay
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = s.dropout
    run = _run(family, target, data, s, validation)
    start, seconds, curve = _resume(folder, model, optimiser, run, s.steps)
    if isinstance(own := getattr(model, "vocab_ids", None), Tensor):
        vocab_ids = own.long()  # a checkpoint's, should `init` have changed since
    to_draft = torch.full((vocabulary,), -1)
    to_draft[vocab_ids] = torch.arange(len(vocab_ids))
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings().weight[vocab_ids].detach()
    usable = [i for i in range(len(data) - validation) if len(data.hidden[i]) > data.prompt_lengths[i] + 1]
    if not usable:
        raise ValueError(
            f"{len(data)} sequence(s) are recorded, and none of those to train on has an answer of two tokens: record "
            "more, with more prompts"
        )
    held_out = make_batch(
        data, range(len(data) - validation, len(data)), 4, s.depth, to_draft, torch.Generator().manual_seed(1)
    )
    bar = tqdm(range(start, s.steps), initial=start, total=s.steps, desc="training", dynamic_ncols=True)
    for step in bar:
        began = time.perf_counter()
        generator = torch.Generator().manual_seed(s.seed * 1_000_003 + step)
        which = [usable[i] for i in torch.randint(len(usable), (s.sequences,), generator=generator).tolist()]
        # every other step has twice the blocks at a smaller depth: early positions decide most, and cost less
        depth, blocks = (s.depth, s.blocks) if step % 2 else (min(s.short_depth, s.depth), 2 * s.blocks)
        batch = make_batch(data, which, blocks, depth, to_draft, generator)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(s, step)
        model.train()
        torch.manual_seed(s.seed * 1_000_003 + step)  # dropout
        drafts = family.forward(model, embedding, head, batch, depth)
        loss, overlap = loss_and_overlap(drafts, batch, s.top_p, s.cross_entropy * (1 - 0.8 * step / s.steps))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        seconds += time.perf_counter() - began
        bar.set_postfix_str(
            f"loss {float(loss.detach()):.3f} overlap {overlap[0]:.2f} {overlap[-1]:.2f}", refresh=False
        )
        if (step + 1) % s.checkpoint_every == 0 or step + 1 == s.steps:
            model.eval()
            with torch.inference_mode():
                drafts = family.forward(model, embedding, head, held_out, s.depth)
                held_loss, held = loss_and_overlap(drafts, held_out, s.top_p, s.cross_entropy)
            curve.append(
                {
                    "step": step + 1,
                    "minutes": seconds / 60,
                    "loss": float(loss.detach()),
                    "held_out_loss": float(held_loss),
                    "overlap": held.tolist(),
                }
            )
            overlaps = " ".join(f"{x:.3f}" for x in held.tolist())
            tqdm.write(f"step {step + 1}: {seconds / 60:.1f} min, held-out loss {held_loss:.3f}, overlap {overlaps}")
            write_text(folder / "curve.json", json.dumps(curve))  # first: behind a checkpoint it is never missing
            _checkpoint(folder, model, optimiser, run=run, step=step + 1, seconds=seconds, curve=curve)
    return model.eval()


def _ends(target: Any) -> list[int]:
    """Ids that end an answer, which every drafter must be able to draft."""
    configured = [getattr(c, "eos_token_id", None) for c in (target.config, getattr(target, "generation_config", None))]
    flat = [t for ids in configured for t in (ids if isinstance(ids, (list, tuple)) else [ids])]
    return sorted({t for t in flat if t is not None})


def _take_over(model: nn.Module, folder: Path, vocab_ids: Tensor) -> Tensor:
    """Copy tensors of the same name and shape from a trained drafter; return the draft vocabulary to use."""
    own = model.state_dict()
    stored, _ = load_tensors(folder / "model.safetensors", "give the folder of a trained drafter, or leave init out")
    taken = {k: v for k, v in stored.items() if k in own and v.shape == own[k].shape}
    if not taken:
        raise ValueError(f"the drafter in {str(folder)!r} has no tensor in common with this one; start without init")
    model.load_state_dict({**own, **taken})
    return taken["vocab_ids"].long() if "vocab_ids" in taken else vocab_ids


def _run(family: Family, target: Any, data: Sequences, s: Settings, validation: int) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that continues from it."""
    settings = {name: value for name, value in asdict(s).items() if name not in ("steps", "checkpoint_every")}
    method = getattr(family, "__name__", type(family).__name__).rpartition(".")[2]
    found = {"method": method, "target": fingerprint(target), "data": data.fingerprint(), "validation": validation}
    return json.loads(json.dumps({**settings, **found}, default=str))


def _checkpoint(folder: Path, model: nn.Module, optimiser: Any, **progress: Any) -> None:
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    for i, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{i}.{k}": v.clone() for k, v in state.items()}
    save_tensors(tensors, folder / "checkpoint.safetensors", **progress)


def _resume(
    folder: Path, model: nn.Module, optimiser: Any, run: Mapping[str, Any], steps: int
) -> tuple[int, float, list[dict[str, Any]]]:
    """Load the checkpoint, if there is one -> steps and seconds done, and the curve."""
    path = folder / "checkpoint.safetensors"
    if not path.is_file():
        return 0, 0.0, []
    tensors, progress = load_tensors(path, "delete it to train from the start")
    remedy = "train into another folder, delete it to start anew, or go back to the settings of that run"
    if "run" not in progress:
        raise ValueError(f"{str(path)!r} does not say which run it belongs to: {remedy}")
    if changed := differences(progress["run"], run):
        raise ValueError(f"{str(path)!r} belongs to another run ({changed}): {remedy}")
    if progress["step"] > steps:
        raise ValueError(f"{str(path)!r} is at step {progress['step']}, beyond the {steps} asked for: {remedy}")
    state = optimiser.state_dict()
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, index, key = name.split(".", 2)
            state["state"].setdefault(int(index), {})[key] = value
    try:
        model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        optimiser.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(f"{str(path)!r} is of another version of this drafter ({first}): {remedy}") from error
    return progress["step"], progress["seconds"], progress["curve"]
