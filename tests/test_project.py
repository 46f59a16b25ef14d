"""The project's promises: installation files agree, the README's commands are run, notebooks and links are clean.

Reported failures: a notebook asks for a kernel that is not there (C147), widget state that is not whole (C149), an
environment that cannot be solved (C155).
"""

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ASKED_FOR = {"jupyterlab", "torch", "numpy", "matplotlib", "ipywidgets", "transformers", "nbmake"}
CLEAN_NOTEBOOK = {
    "nbformat": 4,
    "metadata": {"kernelspec": {"name": "python3"}},
    "cells": [{"cell_type": "code", "source": ["a = 1\n", "a"], "outputs": [], "execution_count": None}],
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project_files() -> list[Path]:
    """Every file that is, or would be, under version control."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def notebooks() -> list[Path]:
    found = [path for path in project_files() if path.suffix == ".ipynb"]
    assert found, "the project has no notebook"
    return found


# --- installation -----------------------------------------------------------------------------------------------------


def pyproject_requirements() -> dict[str, list[Requirement]]:
    """Requirements by group: "core" and each extra."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    return {group: [Requirement(line) for line in lines] for group, lines in groups.items()}


def environment() -> tuple[dict[str, Any], list[str]]:
    """environment.yml and the lines of its pip section."""
    file = yaml.safe_load(read("environment.yml"))
    pip_sections = [entry["pip"] for entry in file["dependencies"] if isinstance(entry, dict)]
    assert len(pip_sections) == 1
    return file, pip_sections[0]


def test_environment_agrees_with_pyproject():
    groups = pyproject_requirements()
    declared = {(canonicalize_name(r.name), str(r.specifier)) for group in groups.values() for r in group}
    _, pip_lines = environment()
    editable = [line for line in pip_lines if line.startswith("-e ")]
    listed = [Requirement(line) for line in pip_lines if not line.startswith("-e ")]

    assert len(editable) == 1
    path, extras = re.fullmatch(r"-e (\S+)\[([\w,]+)\]", editable[0]).groups()
    assert path == "."
    assert set(extras.split(",")) == groups.keys() - {"core"} == {"notebooks", "test", "train"}
    assert {canonicalize_name(r.name) for r in listed} == ASKED_FOR
    for requirement in listed:  # the same package with the same bounds
        assert (canonicalize_name(requirement.name), str(requirement.specifier)) in declared, requirement


@pytest.mark.slow
def test_environment_installs_into_a_clean_environment(tmp_path):
    """The pip section of environment.yml as conda hands it to pip, in an environment that holds nothing else."""
    _, lines = environment()
    (tmp_path / "requirements.txt").write_text("\n".join(lines) + "\n")
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    install = [python, "-m", "pip", "install", "-q", "-r", tmp_path / "requirements.txt"]
    subprocess.run([*install, "-c", ROOT / ".ci" / "constraints.txt"], cwd=ROOT, check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    asked = ", ".join(sorted(ASKED_FOR))
    subprocess.run([python, "-c", f"import avref, {asked}; print(avref.__version__)"], cwd=tmp_path, check=True)


def test_environment_can_be_solved():
    """One channel, Python and pip alone from conda, and no build strings: mixed sources are what breaks such files."""
    file, _ = environment()
    from_conda = [entry for entry in file["dependencies"] if isinstance(entry, str)]
    assert file["channels"] == ["conda-forge"]
    assert [re.match(r"\w+", entry).group() for entry in from_conda] == ["python", "pip"]
    lowest = tomllib.loads(read("pyproject.toml"))["project"]["requires-python"]
    assert from_conda[0].startswith(f"python{lowest}")
    assert not any(re.search(r"(?<![<>=!~])=(?!=)", entry) for entry in from_conda), "C155: no build strings"


def test_what_runs_the_notebooks_comes_with_the_tests():
    """C147: the notebooks' kernel is python3, which ipykernel installs."""
    installed = {canonicalize_name(requirement.name) for requirement in pyproject_requirements()["test"]}
    assert {"nbmake", "ipykernel", "ipywidgets"} <= installed


def test_environment_says_what_each_package_is_for():
    for name in ASKED_FOR:
        assert re.search(rf"^ *- {name}\S* +# \w+", read("environment.yml"), flags=re.MULTILINE), name


def test_constraints_pin_every_dependency_within_its_bounds():
    lines = [line for line in read(".ci/constraints.txt").splitlines() if line and not line.startswith("#")]
    pins = {canonicalize_name(r.name): r for r in map(Requirement, lines)}
    assert len(pins) == len(lines)
    for requirement in (r for group in pyproject_requirements().values() for r in group):
        name = canonicalize_name(requirement.name)
        if name == "pip":  # comes with the environment; a pin would replace it
            continue
        assert name in pins, f"{name} has no version in .ci/constraints.txt"
        (pin,) = pins[name].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} does not allow {pins[name]}"
    assert not {"setuptools", "wheel"} & pins.keys(), "constraints also reach build environments"


def test_pre_commit_uses_the_versions_that_ci_uses():
    hooks = [hook for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]]
    assert {hook["entry"].split()[0] for hook in hooks} == {"ruff", "nbstripout"}
    for hook in hooks:
        (pin,) = hook["additional_dependencies"]
        assert pin in read(".ci/constraints.txt").splitlines()


# --- the commands in the README ---------------------------------------------------------------------------------------


def ci_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def extraction() -> ModuleType:
    return ci_module("readme_command")


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_readme_gives_commands_that_set_themselves_up(extraction, name):
    command = extraction.readme_command(read("README.md"), name)
    assert "python -m venv .venv" in command and "pip install" in command
    assert {"quickstart": "avref quickstart", "test": "-m pytest"}[name] in command


def test_ci_runs_the_test_command_of_the_readme():
    script = read(".ci/run")
    assert re.search(r"^if command=\$\(python \.ci/readme_command\.py test\b", script, flags=re.MULTILINE)
    assert re.search(r'^ *stage .* bash -c "\$command"', script, flags=re.MULTILINE)
    assert "bash .ci/run" in read(".github/workflows/ci.yml")
    for name in ("run", "full", "oldest"):
        subprocess.run(["bash", "-n", str(ROOT / ".ci" / name)], check=True)


def test_no_function_of_ci_hides_a_program_it_looks_for():
    """`command -v chromium` in a function of that name finds the function: the browser's test was never run."""
    for name in ("run", "full", "oldest"):
        script = read(f".ci/{name}")
        functions = set(re.findall(r"^(\w+)\(\)", script, flags=re.MULTILINE))
        assert not functions & set(re.findall(r"(?:command -v|type -P) ([\w-]+)", script))


def test_every_mutant_still_fits_the_source():
    """.ci/full runs them; each changes one place that must be there exactly once."""
    mutants = ci_module("mutants")
    assert mutants.unusable() == []
    assert len(mutants.MUTANTS) >= 30 and {m.operator for m in mutants.MUTANTS} == set(mutants.OPERATORS)


def test_extraction_takes_the_named_block(extraction):
    block = "<!-- command: {} -->\n```bash\n{} \n```\n"
    text = "```bash\nother\n```\n" + block.format("a", "first && second") + block.format("b", "third")
    assert extraction.readme_command(text, "a") == "first && second"
    assert extraction.readme_command(text, "b") == "third"


@pytest.mark.parametrize(
    "text",
    [
        "no marker",
        "<!-- command: a -->",
        "<!-- command: a -->\n\n```bash\nx\n```",
        "<!-- command: a -->\n```python\nx\n```",
        "<!-- command: a -->\n```bash\nx",
        "<!-- command: a -->\n```bash\n```",
        "<!-- command: a -->\n```bash\n \n```",
        "<!-- command: a -->\n```bash\nx\ny\n```",
        "<!-- command: a -->\n```bash\nx\n```\n<!-- command: a -->\n```bash\ny\n```",
    ],
)
def test_extraction_refuses_what_is_not_one_marked_command(extraction, text):
    with pytest.raises(ValueError, match="command: a"):
        extraction.readme_command(text, "a")


# --- notebooks --------------------------------------------------------------------------------------------------------


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def unclean(notebook: dict[str, Any]) -> list[str]:
    """What keeps a notebook from being clean: outputs, widget state, a kernel of one machine, long cells."""
    found = []
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if any(cell["outputs"] or cell["execution_count"] is not None for cell in code):
        found.append("outputs or execution counts are saved")
    if "widgets" in notebook["metadata"]:
        found.append("metadata.widgets is saved")
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel is not python3")
    lengths = [len(source(cell).splitlines()) for cell in code]
    if lengths and statistics.median(lengths) >= 8:
        found.append(f"the median code cell has {statistics.median(lengths)} lines, 8 or more")
    if sum(length >= 27 for length in lengths) > 0.1 * len(lengths):
        found.append(f"more than a tenth of the code cells have 27 lines or more: {sorted(lengths)}")
    return found


def test_notebooks_are_clean():
    problems = {path.name: unclean(json.loads(path.read_text(encoding="utf-8"))) for path in notebooks()}
    assert not {name: found for name, found in problems.items() if found}


def changed(**cell_fields: Any) -> dict[str, Any]:
    return {**CLEAN_NOTEBOOK, "cells": [{**CLEAN_NOTEBOOK["cells"][0], **cell_fields}]}


@pytest.mark.parametrize(
    ("notebook", "expected"),
    [
        (changed(outputs=[{"output_type": "stream"}]), "outputs"),
        (changed(execution_count=3), "execution counts"),
        (changed(source=["a\n"] * 8), "median"),
        ({**CLEAN_NOTEBOOK, "cells": [changed(source=["a\n"] * n)["cells"][0] for n in (1, 1, 27)]}, "a tenth"),
        ({**CLEAN_NOTEBOOK, "metadata": {"kernelspec": {"name": "conda-env-x-py"}}}, "kernel"),
        ({**CLEAN_NOTEBOOK, "metadata": {"kernelspec": {"name": "python3"}, "widgets": {}}}, "widgets"),
    ],
)
def test_unclean_notebooks_are_noticed(notebook, expected):
    assert unclean(CLEAN_NOTEBOOK) == []
    (problem,) = unclean(notebook)
    assert expected in problem


# --- links and paths --------------------------------------------------------------------------------------------------


def relative_links(markdown: str) -> list[str]:
    """The targets of links and pictures that point into the project, without the part after "#"."""
    prose = re.sub(r"^(```|~~~).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"`[^`\n]*`", "", prose)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", prose) + re.findall(r"""<[^>]+\b(?:src|href)=["']([^"']+)""", prose)
    inside = [target for target in targets if not re.match(r"[a-zA-Z][\w+.-]*:|//|#", target)]
    return [unquote(target.split("#")[0].split("?")[0]) for target in inside]


def test_relative_links_resolve():
    files = project_files()
    folders = {parent for path in files for parent in path.parents if parent.is_relative_to(ROOT)}
    known = {*files, *folders}  # an ignored file is not in it: on another machine a link to it is dead
    texts = {ROOT / name: read(name) for name in ("README.md", "CONTRIBUTING.md")}
    for path in notebooks():
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts[path] = "\n\n".join(source(cell) for cell in cells if cell["cell_type"] == "markdown")
    dead = [
        f"{path.relative_to(ROOT)}: {target}"
        for path, text in texts.items()
        for target in relative_links(text)
        if (path.parent / target).resolve() not in known
    ]
    assert not dead


def test_relative_links_are_found():
    text = (
        "[a](x/y.md#part) ![b](fig.png) <img src='c%20d.png'> [d](https://e.org/f) [g](#h) [m](mailto:n) `[i](j)`\n"
        "```\n[k](l)\n```\n[![o](p.svg)](q.md)"
    )
    assert sorted(relative_links(text)) == ["c d.png", "fig.png", "p.svg", "q.md", "x/y.md"]


# Folders in which people and machines keep their own things; the shipped prompts are prose and may speak of any path.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|work|workspace|mnt|opt)/[\w.]+|\b[A-Z]:\\+Users\\")


def test_no_file_names_a_path_of_one_machine():
    found = []
    for path in project_files():
        raw = path.read_bytes()
        if b"\0" in raw or path.is_relative_to(ROOT / "avref" / "data"):
            continue
        text = raw.decode("utf-8")
        found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in MACHINE_PATH.finditer(text)]
    assert not found


def test_machine_paths_are_noticed():
    home, windows = "/" + "home/someone/x", "C:" + "\\Users\\x"
    for text in (f'open("{home}")', f"({home})", f"see {home}.", windows):
        assert MACHINE_PATH.search(text), text
    for text in ("https://e.org/home/x", "~/work/x", "a/opt/b", "src/root/c", "../work/x"):
        assert not MACHINE_PATH.search(text), text
