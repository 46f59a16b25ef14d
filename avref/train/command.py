"""`python -m avref train METHOD`: sample, train, evaluate on held-out samples, write weights and card.

Every stage continues where a stopped run left off.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from avref.config import SamplingParams, whole
from avref.drafters import weights
from avref.llm import LLM
from avref.packed import plain_attention
from avref.train import card, family
from avref.train.data import Recorder, Sequences, build_shards, build_text_shards
from avref.train.evaluate import held_out_overlap
from avref.train.loop import Settings, train
from avref.train.prompts import training_prompts
from avref.train.text import python_texts

SAMPLING = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=160)
SETTINGS = {
    "dflash": Settings(),
    "dspark": Settings(),
    "eagle": Settings(short_depth=2),
    "mtp": Settings(depth=5, num_layers=5, intermediate_size=256, target_layers=(29, 30)),
    "draft_model": Settings(num_layers=2, target_layers=(), steps=4000),
}
HELD_OUT = {"per_workload": 8, "max_tokens": 64}


def run(
    method: str,
    model: str,
    output: Path,
    num_prompts: int = 6000,
    num_texts: int = 2000,
    steps: int | None = None,
    init: Path | None = None,
) -> Path:
    """Run all stages and return the folder of the trained drafter.

    It holds `config.json`, `model.safetensors`, `curve.json`, `curve.png`, `held_out.json` and `card.md`. All of it is
    done on the CPU. Raises ValueError for a method that no training is written for, a target whose logits are not its
    head on its last hidden state, and an `output` where another run was made.
    """
    trained = family(method)
    whole("prompts", num_prompts, 0)
    whole("texts", num_texts, 0 if num_prompts else 1)
    if steps is not None:
        whole("steps", steps, 1)
    settings = replace(SETTINGS[method], init=init)
    settings = settings if steps is None else replace(settings, steps=steps)
    llm = LLM(model, max_num_seqs=64, device="cpu", dtype="float32")
    llm.model.requires_grad_(False)
    last = llm.model.config.get_text_config().num_hidden_layers
    settings = replace(settings, target_layers=layers_of(last, settings.target_layers))
    lookup = first_state_is_the_embedding(llm) and 0 in settings.target_layers
    recorded = tuple(sorted({*settings.target_layers[lookup:], last}))  # labels need the last one
    shards, texts = output / "shards", python_texts(num_texts) if llm.tokenizer and num_texts else []
    paths = build_text_shards(llm, recorded, texts, shards)
    # behind the texts: the last sequences are held out, and are to be the target's own
    paths += build_shards(llm, Recorder(recorded), training_prompts(num_prompts), SAMPLING, shards)
    data = Sequences.load(*paths, embedding=llm.model.get_input_embeddings() if lookup else None)
    data.keep_layers(recorded, settings.target_layers[lookup:])
    drafter = train(trained, llm.model, data, output, settings)
    folder = output / "out"
    weights.save(drafter, folder, method, llm.name)
    held_out = {
        f"{p:g}": held_out_overlap(llm, method, folder, num_speculative_tokens=settings.depth, top_p=p, **HELD_OUT)
        for p in (0.95, 1.0)
    }
    curve: list[dict[str, Any]] = json.loads((output / "curve.json").read_text())
    parts = [f"python -m avref train {method} --model {llm.name} --prompts {num_prompts} --texts {num_texts}"]
    parts += [f"--steps {settings.steps}"] + ([f"--init {init}"] if init else [])
    sources = [
        f"{num_prompts:,} answers sampled from the target itself at temperature {SAMPLING.temperature:g}, top-p "
        f"{SAMPLING.top_p:g} to prompts of `avref.train.prompts` (seed 0)",
        f"{len(texts):,} pieces of text that ships with Python, labelled by the target",
    ]
    used = [source for source, count in zip(sources, (num_prompts, len(texts)), strict=True) if count]
    described = f"{card.count_tokens(data, 'sequences')}, some held out for the curve: {' and '.join(used)}"
    per, tokens = HELD_OUT["per_workload"], HELD_OUT["max_tokens"]
    card.write(
        folder,
        llm,
        method,
        settings,
        curve,
        held_out,
        data=described,
        command=" ".join(parts),
        prompts=per,
        tokens=tokens,
    )
    return folder


def layers_of(last: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Hidden states of a target of `last` layers that stand where `layers` do in the default target, which has 30.

    The embedding (0) and the last two keep their places at the ends; the others are spread alike.
    """
    places = {n and (last - (30 - n) if n >= 29 else round(n * last / 30)) for n in layers}
    return tuple(sorted({max(0, n) for n in places}))


@torch.inference_mode()
def first_state_is_the_embedding(llm: LLM) -> bool:
    """Whether the target's hidden state 0 is a plain lookup, which then need not be recorded.

    Raises ValueError when its logits are more than its head on the last hidden state (Granite and Cohere scale them,
    Gemma 2 caps them): the labels would be wrong.
    """
    ids = torch.arange(min(8, llm.vocab_size), device=llm.device)[None]
    with plain_attention(llm.model):
        out = llm.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    logits = llm.model.get_output_embeddings()(out.hidden_states[-1])
    if not torch.allclose(out.logits, logits, atol=1e-3, rtol=1e-3):
        raise ValueError(
            f"{llm.name} scales or caps the logits of its head, and training is not written for that: use a drafter "
            "without training (ngram, layer_skip, or draft_model with a smaller model of the same family)"
        )
    return torch.equal(out.hidden_states[0], llm.model.get_input_embeddings()(ids))
