"""Security: no code comes from a file, and no file is trusted for its name."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

import avref
from avref import models

ROOT = Path(avref.__file__).parent
MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle"}
BUILT_INS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"torch.load", "torch.hub.load", "os.system", "os.popen", "os.execv", "pickle.loads", "numpy.load_pickle"}
SHELLS = {"getoutput", "getstatusoutput", "create_subprocess_shell"}


def dangers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) for each way in which a string or a file could become code."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        yield from ((node.lineno, n) for n in names if n.split(".")[0] in MODULES or n in ATTRIBUTES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {k.arg: k.value for k in node.keywords}
        if called in BUILT_INS | ATTRIBUTES or called.split(".")[-1] in SHELLS:
            yield node.lineno, called
        if "shell" in options and ast.unparse(options["shell"]) != "False":
            yield node.lineno, "shell"
        if called in ("np.load", "numpy.load") and ast.unparse(options.get("allow_pickle", ast.Constant(0))) != "False":
            yield node.lineno, "np.load without allow_pickle=False"
        if called.startswith("subprocess.") and not (node.args and isinstance(node.args[0], (ast.List, ast.Name))):
            yield node.lineno, "a command that is no list"
        if "trust_remote_code" in options and ast.unparse(options["trust_remote_code"]) != "False":
            yield node.lineno, "trust_remote_code"
        if "weights_only" in options or ast.unparse(options.get("use_safetensors", ast.Constant(True))) != "True":
            yield node.lineno, "weights that are no safetensors"


def test_nothing_in_the_package_turns_a_file_into_code() -> None:
    sources = sorted(ROOT.rglob("*.py"))
    assert len(sources) > 50
    found = [(str(p.relative_to(ROOT)), *d) for p in sources for d in dangers(ast.parse(p.read_bytes()))]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "from torch import load\nfrom os import system",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls')",
        "subprocess.getoutput('ls')",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "auto.from_pretrained(name, trust_remote_code=True)",
        "auto.from_pretrained(name, use_safetensors=False)",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert list(dangers(ast.parse(line)))


# ---- code in a model's folder
@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose folder carries code; the code leaves a file when it runs."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    made = tmp_path / "model"
    tiny.llama().save_pretrained(made)
    tiny.tokenizer([f"w{i}" for i in range(tiny.VOCAB)]).save_pretrained(made)
    (made / "modeling_custom.py").write_text(
        f"from pathlib import Path\n\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class CustomConfig(LlamaConfig):\n    model_type = 'custom'\n\n\n"
        "class CustomModel(LlamaForCausalLM):\n    config_class = CustomConfig\n"
    )
    return made


def carry(folder: Path, model_type: str) -> None:
    path = folder / "config.json"
    classes = {"AutoConfig": "modeling_custom.CustomConfig", "AutoModelForCausalLM": "modeling_custom.CustomModel"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type, "auto_map": classes}))


def load(folder: Path, **settings: Any) -> avref.LLM:
    return avref.LLM(str(folder), dtype="float32", max_num_seqs=2, max_model_len=64, **settings)


def test_remote_code_runs_only_when_it_is_asked_for(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """And nobody is asked a question that a hasty yes would answer."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    carry(folder, "custom")
    with pytest.raises(RuntimeError, match="custom code"):
        load(folder)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2}
    with pytest.raises(RuntimeError, match="custom code"):
        avref.LLM(tiny.llama(), config, max_num_seqs=2, max_model_len=64)
    carry(folder, "llama")  # a type that transformers knows: its own class is taken, not the folder's
    assert type(load(folder).model).__module__.startswith("transformers.models.llama")
    with pytest.raises(RuntimeError, match="could not load"):  # a tokenizer may carry code too
        tokenizer = folder / "tokenizer_config.json"
        auto = {"auto_map": {"AutoTokenizer": ["modeling_custom.CustomModel", None]}, "tokenizer_class": "Custom"}
        tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), **auto}))
        models.load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()
    load_model = models.load_model(folder, torch.device("cpu"), torch.float32, trust_remote_code=True)
    assert (tmp_path / "ran").exists() and load_model is not None  # the trap works


def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    (folder / "model.safetensors").unlink()
    torch.save({"weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(RuntimeError, match="could not load"):
        load(folder)
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()  # the trap works
