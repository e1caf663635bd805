"""The TensorFlow room's tests on each TensorFlow that we support, in virtual environments of their own, one after another.

    python tests/compat/run.py                  all versions; writes docs/tensorflow-versions.md
    python tests/compat/run.py 2.15 newest      only these; the other rows of the page stay as they are
    python tests/compat/run.py --remove         each environment (about 2 GB) is removed when its tests have run

Midstride is installed without what it requires, so that TensorFlow's own choice of NumPy and ml_dtypes stands; what pip
has to say to the combination is in the page. Exit code 1 if a test failed or an environment could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".compat"
PAGE = ROOT / "docs" / "tensorflow-versions.md"

VERSIONS = {
    "2.15": "tensorflow-cpu==2.15.*",  # the last with Keras 2, and with the old hook in its package
    "2.16": "tensorflow-cpu==2.16.*",  # the first without the old hook
    "2.18": "tensorflow-cpu==2.18.*",  # the first with NumPy 2
    "newest": "tensorflow-cpu",
}
BESIDES = ["xxhash", "typer", "rich", "safetensors", "scikit-learn", "pytest", "pytest-timeout", "hypothesis"]
ROOM = ["tests/frameworks/tensorflow", "tests/docs/test_tensorflow_guide.py"]
CORE = ["tests/unit/format", "tests/unit/storage", "tests/unit/restore", "tests/contract", "tests/property"]
TESTS = [*ROOM, *CORE]  # the core too, because of the NumPy and ml_dtypes that come with each

COUNTS = ["passed", "failed", "skipped", "expected to fail"]
COLUMNS = ["asked for", "TensorFlow", "Python", "NumPy", "ml_dtypes", "Keras", *COUNTS, "date", "commit"]
HEAD = f"""# On which TensorFlow it was tried

`make compat` writes this page: for each version a virtual environment of its own, on Linux, with `tensorflow-cpu`; in it the tests of
`tests/frameworks/tensorflow`, the guide's code, and the core's that need no framework (they show the NumPy and ml_dtypes). "Expected to fail" are the runs of those tests against an imitation of TensorFlow's old hook, which has the
faults that they look for.

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
"""


def make_environment(name: str) -> Path:
    """Return the Python of the environment, made anew or brought up to date."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--upgrade", VERSIONS[name], *BESIDES])
    run([*pip, "--no-deps", "--editable", str(ROOT)])
    # One that cannot be imported would have its tests skipped, and look as if none failed.
    run([str(python), "-W", "ignore", "-c", "import tensorflow"])
    return python


def run(command: list[str]) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def versions_in(python: Path) -> dict[str, str]:
    """What is installed there."""
    script = (
        "import json, platform; from importlib.metadata import version as v\n"
        "names = {'TensorFlow': 'tensorflow-cpu', 'NumPy': 'numpy', 'ml_dtypes': 'ml_dtypes', 'Keras': 'keras'}\n"
        "print(json.dumps({'Python': platform.python_version()} | {n: v(p) for n, p in names.items()}))"
    )
    found: dict[str, str] = json.loads(subprocess.check_output([python, "-c", script]))
    return found


def what_pip_says(python: Path) -> list[str]:
    """Its complaints about what Midstride requires."""
    done = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line.startswith("midstride ")]


def commit() -> str:
    """Of the code that is tried."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changes = git("status", "--porcelain", "--", "src", "tests")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" and changes" if changes else "")


def run_tests(name: str, python: Path) -> tuple[dict[str, int], list[str]]:
    """Counts, and the names of the tests that failed."""
    report = ENVIRONMENTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    tests = [test for test in TESTS if (ROOT / test).exists()]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["--continue-on-collection-errors", *tests]
    print("$", " ".join(command), flush=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    counts = dict.fromkeys(COUNTS, 0)
    failed = []
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = outcome_of(case)
        counts[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
    return counts, failed


def outcome_of(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "expected to fail" if skipped.get("type") == "pytest.xfail" else "skipped"


def kept_parts() -> tuple[dict[str, str], dict[str, str]]:
    """The page's rows and sections, by version."""
    text = PAGE.read_text() if PAGE.exists() else ""
    rows = {row.split("|")[1].strip(): row for row in re.findall(r"^\|.*\|$", text, re.M)}
    sections = dict(re.findall(r"^## (\S+)\n\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    return {k: v for k, v in rows.items() if k in VERSIONS}, {k: v for k, v in sections.items() if k in VERSIONS}


def write_page(rows: dict[str, str], sections: dict[str, str]) -> None:
    text = HEAD + "".join(f"{rows[name]}\n" for name in VERSIONS if name in rows)
    text += "".join(f"\n## {name}\n\n{sections[name].strip()}\n" for name in VERSIONS if name in sections)
    PAGE.write_text(text)


def try_version(name: str) -> bool:
    """Make the environment, run the tests, renew the version's part of the page; whether all passed."""
    python = make_environment(name)
    versions = versions_in(python)
    counts, failed = run_tests(name, python)
    facts = {"asked for": name, **versions, **counts, "date": datetime.now(UTC).date().isoformat(), "commit": commit()}
    rows, sections = kept_parts()
    rows[name] = f"| {' | '.join(str(facts[column]) for column in COLUMNS)} |"
    sections.pop(name, None)
    notes = [f"- pip: {line}" for line in what_pip_says(python)] + [f"- failed: `{test}`" for test in failed]
    if notes:
        sections[name] = "\n".join(notes)
    write_page(rows, sections)
    return not failed and counts["passed"] > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"of {', '.join(VERSIONS)}; default: all")
    parser.add_argument("--remove", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.versions) - set(VERSIONS):
        parser.error(f"there is no {', '.join(sorted(unknown))}: it is one of {', '.join(VERSIONS)}")
    good = True
    for name in arguments.versions or VERSIONS:
        try:
            good &= try_version(name)
        except (subprocess.CalledProcessError, ET.ParseError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            good = False
        finally:
            if arguments.remove:
                shutil.rmtree(ENVIRONMENTS / name, ignore_errors=True)
    print(PAGE.read_text() if PAGE.exists() else "")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
