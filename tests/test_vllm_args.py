"""`vllm-args`: the command is read back by a real shell, holds vLLM's keys only, and names everything else."""

import json
import shlex
import subprocess

import pytest
import torch

from avref import SpeculativeConfig, cli
from avref.config import METHODS
from avref.drafters import weights
from avref.vllm_args import PLACEHOLDER, VLLM_DEFAULTS, VLLM_KEYS, VLLM_METHODS, parse_settings, vllm_args

CONFIG = {
    "method": "dflash",
    "model": "org/drafter",
    "num_speculative_tokens": 5,
    "draft_sample_method": "probabilistic",
    "enable_adaptive_verification": True,
}
ARTICLE = {"model", "method", "num_speculative_tokens", "draft_sample_method", "enable_adaptive_verification"}


def read_back(command: str) -> list[str]:
    """The words that a shell makes of a command whose first word is `vllm`."""
    script = 'vllm() { printf "%s\\0" vllm "$@"; }\n' + command
    out = subprocess.run(["bash", "-c", script], capture_output=True, check=True, text=True).stdout
    return out.split("\0")[:-1]


def flags(words: list[str]) -> dict[str, str]:
    assert words[:2] == ["vllm", "serve"] and len(words) % 2 == 1
    return dict(zip(words[3::2], words[4::2], strict=True))


def test_the_command_of_the_article():
    words = read_back(str(vllm_args(CONFIG, "org/target")))
    assert words[2] == "org/target" and list(flags(words)) == ["--speculative-config"]
    assert json.loads(flags(words)["--speculative-config"]) == CONFIG
    assert set(VLLM_KEYS) == ARTICLE


@pytest.mark.parametrize("method", VLLM_METHODS)
@pytest.mark.parametrize("adaptive", [True, False])
def test_what_is_read_back_is_what_was_configured(method, adaptive):
    model = None if method == "ngram" else "org/drafter"
    config = {**CONFIG, "method": method, "model": model, "enable_adaptive_verification": adaptive}
    made = vllm_args(config, "org/target", max_num_seqs=32, max_model_len=2048, dtype="float16")
    words = read_back(str(made))
    found = flags(words)
    speculative = json.loads(found.pop("--speculative-config"))
    assert found == {"--max-num-seqs": "32", "--max-model-len": "2048", "--dtype": "float16"}
    assert words == made.argv and speculative == made.speculative_config
    assert speculative.items() <= config.items()
    missing = set(config) - set(speculative)
    assert missing == ({"model", "draft_sample_method", "enable_adaptive_verification"} if method == "ngram" else set())


@pytest.mark.parametrize(
    "name",
    ["a folder/it's here", 'x"y', "$HOME/`id`", "back\\slash", "new\nline", "ü/モデル", "a;b&c|d>e*?~!#", "a~/x"],
)
def test_no_name_escapes_its_quotes(name):
    words = read_back(str(vllm_args({**CONFIG, "model": name}, name)))
    assert words[2] == name
    assert json.loads(flags(words)["--speculative-config"])["model"] == name
    assert shlex.split(str(vllm_args(None, name))) == ["vllm", "serve", name]


def test_names_that_only_this_package_knows_become_those_that_vllm_finds(monkeypatch):
    """ "~" is expanded by `LLM`, and by no shell inside quotes; the default target has a name on the hub."""
    monkeypatch.setenv("HOME", "/mine")
    words = read_back(str(vllm_args({**CONFIG, "method": "draft_model", "model": "smollm2"}, "~/x")))
    assert words[2] == "/mine/x"
    assert json.loads(flags(words)["--speculative-config"])["model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_for_dspark_the_advice_is_the_head_and_no_estimator():
    made = vllm_args({"method": "dspark", "num_speculative_tokens": 7, "enable_adaptive_verification": True}, "org/t")
    likes = {d.key: d.like_vllm for d in made.differences if d.like_vllm is not None}
    assert likes["confidence"] == "head" and not {"estimator", "probe_interval"} & likes.keys()
    SpeculativeConfig.from_dict({"method": "dspark", "enable_adaptive_verification": True, **likes})


def test_plain_decoding_has_no_speculative_config():
    made = vllm_args(None, "org/target")
    assert read_back(str(made)) == ["vllm", "serve", "org/target"] and made.report() == ""


def test_methods_that_vllm_does_not_have_are_refused():
    for method in set(METHODS) - set(VLLM_METHODS):
        with pytest.raises(ValueError, match=rf"'{method}', which vLLM does not have.*'draft_model', 'eagle'"):
            vllm_args({**CONFIG, "method": method}, "org/target")
    assert set(VLLM_METHODS) < set(METHODS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "budget_rule": "best"}, "'best'; allowed are 'lookahead'"),
        ({**CONFIG, "depth": 3}, "a speculative_config key is 'depth'"),
        ({**CONFIG, "feature": "logit_q_sampled"}, "would bias the output"),
        ({"num_speculative_tokens": 3}, "needs a 'method'"),
    ],
)
def test_what_llm_refuses_is_refused_here(config, message):
    with pytest.raises(ValueError, match=message):
        vllm_args(config, "org/target")


@pytest.mark.parametrize("model", ["", "--trust-remote-code", None, 3])
def test_a_target_needs_a_name(model):
    with pytest.raises(ValueError, match="hub id or folder"):
        vllm_args(CONFIG, model)


def differences(**settings):
    return {(d.key, json.dumps(d.here)): d for d in vllm_args({**CONFIG, **settings}, "t").differences}


def test_our_defaults_differ_in_four_settings_and_these_bring_vllm_s_back():
    found = differences()
    assert {key for key, _ in found} == set(VLLM_DEFAULTS)
    for (key, _), d in found.items():
        assert d.here == getattr(SpeculativeConfig(method="dflash"), key) or key == "estimator"
        assert d.like_vllm == VLLM_DEFAULTS[key] and d.vllm
    assert differences(**VLLM_DEFAULTS) == {}
    assert vllm_args({**CONFIG, **VLLM_DEFAULTS}, "t").speculative_config == CONFIG


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"confidence": "q_max"}, "confidence"),
        ({"confidence": "threshold", "threshold": 0.3}, "threshold"),
        ({"confidence": "stop_head"}, "confidence"),
        ({"feature": "entropy"}, "feature"),
        ({"feature": "logit_q_sampled", "allow_lossy": True}, "feature"),
        ({"budget_rule": "early_stop"}, "budget_rule"),
        ({"probe_interval": 8}, "probe_interval"),
        ({"estimator": {"step": "newton", "damping": 20.0}}, "estimator"),
        ({"estimator": {"step": "newton", "intercept": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])}}, "estimator"),
    ],
)
def test_every_setting_of_ours_is_listed(settings, key):
    made = vllm_args({**CONFIG, **VLLM_DEFAULTS, "estimator": {}, "budget_rule": "lookahead", **settings}, "t")
    assert set(made.speculative_config) == ARTICLE
    assert key in {d.key for d in made.differences} and f"  {key}=" in made.report()


def test_settings_that_do_nothing_here_are_not_listed():
    assert differences(enable_adaptive_verification=False) == {}
    stopping = {key for key, _ in differences(confidence="threshold")}
    assert stopping == {"confidence"}  # a stopping rule has no budget, no probes, no fit
    head = {key for key, _ in differences(method="dspark", confidence="head")}
    assert head == {"budget_rule", "adaptive_drafting"}
    assert differences(method="dspark")["confidence", '"auto"'].like_vllm == "head"


def test_drafters_that_vllm_cannot_load_become_a_placeholder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"method": "dflash"}))
    assert weights.is_drafter(tmp_path)
    for model in (None, tmp_path, torch.nn.Linear(1, 1)):
        made = vllm_args({**CONFIG, "model": model}, "t")
        assert made.speculative_config["model"] == PLACEHOLDER and PLACEHOLDER in made.report()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    made = vllm_args({**CONFIG, "method": "draft_model", "model": tmp_path}, "t")
    assert made.speculative_config["model"] == str(tmp_path) and PLACEHOLDER not in made.report()
    assert "model" not in vllm_args({**CONFIG, "method": "mtp", "model": None}, "t").speculative_config


def test_n_grams_are_verified_at_a_fixed_length():
    made = vllm_args({"method": "ngram", "num_speculative_tokens": 4, "enable_adaptive_verification": True}, "t")
    assert made.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    assert "enable_adaptive_verification is left out" in made.report() and not made.differences


def test_the_default_target_has_a_hub_id():
    made = vllm_args(CONFIG)
    assert made.argv[2] == "HuggingFaceTB/SmolLM2-135M-Instruct" and "4-bit" in made.report()


# ---- the command line


def test_the_command_line_prints_the_command_and_says_the_rest_aside(capsys):
    asked = ["vllm-args", "--model", "org/it's", "--method", "draft_model", "--drafter", "org/small", "--dtype", "half"]
    settings = ["--num-speculative-tokens", "4", "--max-num-seqs", "8", "--settings", '{"feature": "entropy"}']
    assert cli.main(asked + settings) == 0
    out, err = capsys.readouterr()
    words = read_back(out)
    assert words[2] == "org/it's" and flags(words)["--max-num-seqs"] == "8" and flags(words)["--dtype"] == "half"
    speculative = json.loads(flags(words)["--speculative-config"])
    changed = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 4}
    assert speculative == {**CONFIG, **changed}
    assert "feature='entropy': always logit(max q)" in err and "stale" in err


def test_a_fixed_length_from_the_command_line(capsys):
    assert cli.main(["vllm-args", "--fixed", "--draft-sample-method", "greedy", "--drafter", "d"]) == 0
    speculative = json.loads(flags(read_back(capsys.readouterr().out))["--speculative-config"])
    assert speculative["enable_adaptive_verification"] is False and speculative["draft_sample_method"] == "greedy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "layer_skip"], "vLLM does not have"),
        (["--settings", "{budget_rule: stale}"], "no JSON"),
        (["--settings", "[1]"], "JSON object"),
        (["--settings", '{"budget": 1}'], "'budget'"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens is 0"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, message, capsys):
    assert cli.main(["vllm-args", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_settings_are_a_json_object():
    assert parse_settings('{"estimator": {"step": "newton"}}') == {"estimator": {"step": "newton"}}
