"""The training loop, the same for every family: resumable, seeded, with a progress bar and a validation curve."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from avref.train.blocks import Family, loss_and_overlap, make_batch
from avref.train.data import Sequences


@dataclass(frozen=True)
class Settings:
    """One training run: `sequences` x `blocks` blocks in each step.

    The learning rate warms up linearly, then falls along a cosine to a twentieth.
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

    Continues from `folder/checkpoint.safetensors` when it is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = target.get_output_embeddings().weight.shape[0]
    torch.manual_seed(s.seed)
    eos = [t for t in [target.config.eos_token_id] if isinstance(t, int)]
    vocab_ids = data.frequent_ids(min(s.vocab_size, vocabulary), eos, vocabulary)
    model = family.start(target, s, vocab_ids)
    if s.init is not None:
        vocab_ids = _take_over(model, s.init, vocab_ids)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=s.learning_rate, betas=(0.9, 0.95), weight_decay=s.weight_decay
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = s.dropout
    start, seconds, curve = _resume(folder, model, optimiser)
    to_draft = torch.full((vocabulary,), -1)
    to_draft[vocab_ids] = torch.arange(len(vocab_ids))
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings().weight[vocab_ids].detach()
    validation = min(validation, len(data) // 8)
    usable = [i for i in range(len(data) - validation) if len(data.hidden[i]) > data.prompt_lengths[i] + 1]
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
        loss, overlap = loss_and_overlap(family.forward(model, embedding, head, batch, depth), batch, s.top_p)
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
                held_loss, held = loss_and_overlap(drafts, held_out, s.top_p)
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
            _checkpoint(folder, model, optimiser, step + 1, seconds, curve)
            (folder / "curve.json").write_text(json.dumps(curve))
    return model.eval()


def _take_over(model: nn.Module, folder: Path, vocab_ids: Tensor) -> Tensor:
    """Copy tensors of the same name and shape from a trained drafter; return the draft vocabulary to use."""
    from safetensors.torch import load_file

    own = model.state_dict()
    taken = {k: v for k, v in load_file(folder / "model.safetensors").items() if k in own and v.shape == own[k].shape}
    if not taken:
        raise ValueError(f"the drafter in {str(folder)!r} has no tensor in common with this one; start without init")
    model.load_state_dict({**own, **taken})
    return taken["vocab_ids"].long() if "vocab_ids" in taken else vocab_ids


def _checkpoint(
    folder: Path, model: nn.Module, optimiser: Any, step: int, seconds: float, curve: list[dict[str, Any]]
) -> None:
    from safetensors.torch import save_file

    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    for i, state in optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{i}.{k}": v.clone() for k, v in state.items()}
    save_file(
        tensors,
        folder / "checkpoint.part",
        metadata={"progress": json.dumps({"step": step, "seconds": seconds, "curve": curve})},
    )
    (folder / "checkpoint.part").replace(folder / "checkpoint.safetensors")


def _resume(folder: Path, model: nn.Module, optimiser: Any) -> tuple[int, float, list[dict[str, Any]]]:
    path = folder / "checkpoint.safetensors"
    if not path.is_file():
        return 0, 0.0, []
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        progress = json.loads(file.metadata()["progress"])
        tensors: dict[str, Tensor] = {k: file.get_tensor(k) for k in file.keys()}
    model.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
    state = optimiser.state_dict()
    for name, value in tensors.items():
        if name.startswith("optimiser."):
            _, index, key = name.split(".", 2)
            state["state"].setdefault(int(index), {})[key] = value
    optimiser.load_state_dict(state)
    return progress["step"], progress["seconds"], progress["curve"]
