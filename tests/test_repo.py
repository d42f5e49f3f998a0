"""What the repository promises about itself: sizes, README, copy-paste."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
PRODUCT = sorted(p for p in ROOT.glob("*.py") if p.name != "benchmark.py")


def nonblank(path) -> int:
    return sum(bool(line.strip()) for line in path.read_text("utf-8").splitlines())


def test_files_and_functions_stay_small():
    assert sum(map(nonblank, PRODUCT)) <= 2120
    for path in [*PRODUCT, *ROOT.glob("*.cpp"), *ROOT.glob("benchmark.py")]:
        assert nonblank(path) <= 500, path
        assert max(map(len, path.read_text("utf-8").splitlines())) <= 100, path
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, (path, node.name)


def test_the_line_counts_in_the_readme_are_true():
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \|", README, re.M)
    assert {name for name, _ in rows} >= {p.name for p in PRODUCT}
    for name, count in rows:
        assert nonblank(ROOT / name) == int(count), name


def test_spec_and_model_work_when_copied_alone(tmp_path):
    """The README's snippet in an empty folder with just these two files."""
    for name in ("model.py", "spec.py"):
        shutil.copy(ROOT / name, tmp_path)
    (snippet,) = [s for s in re.findall(r"```python\n(.*?)```", README, re.S) if "from model" in s]
    (tmp_path / "mine.py").write_text(snippet)
    done = subprocess.run([sys.executable, "-I", "-c", "import sys; sys.path[:0] = ['.']; exec(open('mine.py').read())"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(ast.literal_eval(done.stdout)) >= 100


COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()]


@pytest.mark.parametrize("command", [c for c in COMMANDS if "pytest" not in c])
def test_every_readme_command_runs(command, tmp_path, smollm2):
    """All but the installation, which has happened where this runs."""
    command = re.sub(r"^pip install \S+ \S+ && ", "", command).replace("prompts.jsonl", f"{tmp_path}/prompts.jsonl")
    command = command.replace("python ", f"{sys.executable} ")
    command = command.replace("answers.jsonl", f"{tmp_path}/answers.jsonl")
    (tmp_path / "prompts.jsonl").write_text('"Name three rivers."\n')  # an earlier command makes it
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and ("tokens per step" in done.stderr or "benchmark" in command)


def test_the_readme_python_example_runs(smollm2):
    (snippet,) = [s for s in re.findall(r"```python\n(.*?)```", README, re.S) if "LLM(" in s]
    done = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
