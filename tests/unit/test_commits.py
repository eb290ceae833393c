"""The check of commit subjects, on subjects and on small repositories."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import commits

GOOD = """\
scheduler: admit prefix hits before new prompts
.ci: check the subjects of commits
docs/papers, readme: pass, process and address what differs
kernels/attention: embed the mask in the schedule, in 16-bit floats
tests: focus on one rank; bias the draw"""
VERBS = "alias always bias bring bypass discuss embed exceed feed focus need ping shed shred spring string toss weed"


@pytest.mark.parametrize("subject", [*GOOD.splitlines(), *(f"area: {verb} it" for verb in VERBS.split())])
def test_a_subject_that_names_an_area_and_what_to_do_is_fine(subject: str) -> None:
    assert commits.fault(subject) is None


@pytest.mark.parametrize(
    "subject, problem",
    [
        ("loading: " + "a" * 64, "73 characters, 1 too many"),
        *((subject, "does not read") for subject in ("", "Tokens come of a table", "loading:obey it", "loading: ")),
        *((subject, "does not read") for subject in ("the index: obey it", "Loading: obey it", "loading: Obey it")),
        ("loading: obey the index.", "ends with a period"),
        *((f"loading: {verb} the index", f"'{verb}' is no imperative") for verb in ("fixed", "reading", "obeys")),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_subject_is_said(subject: str, problem: str) -> None:
    assert problem in (commits.fault(subject) or "")


def git(where: Path, *words: str) -> None:
    who = {f"GIT_{role}_{key}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    environment = {**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "-C", str(where), *words], check=True, capture_output=True, env=environment, timeout=60)


def check(repository: Path, **environment: str) -> tuple[int, str]:
    """Runs the repository's copy of the check: its exit status, and all that it prints."""
    words = [sys.executable, "-S", str(repository / commits.OWN)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One commit of the old form, and the one that adds the check."""
    root = tmp_path / "repository"
    (root / "tests").mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    git(root, "commit", "-q", "--allow-empty", "-m", "What came before is not looked at.")
    shutil.copy(commits.__file__, root / commits.OWN)
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "The commit that adds it is not looked at.")
    return root


def test_commits_after_the_check_was_added_are_checked_and_merges_are_not(repository: Path) -> None:
    assert check(repository) == (0, "commits: 0 subjects are fine\n")
    git(repository, "checkout", "-q", "-b", "side", "HEAD~1")  # a branch from before the check
    git(repository, "commit", "-q", "--allow-empty", "-m", "side: say why", "-m", "Its body is free. It may end so.")
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "--no-ff", "side", "-m", "Merge branch 'side'")
    assert check(repository) == (0, "commits: 1 subjects are fine\n")
    git(repository, "commit", "-q", "--allow-empty", "-m", "Say why")
    status, problem = check(repository)
    assert status == 1 and "'Say why': it does not read `area: imperative`" in problem and "git rebase" in problem


def test_where_history_is_missing_a_note_says_so(repository: Path, tmp_path: Path) -> None:
    git(repository, "commit", "-q", "--allow-empty", "-m", "Wrong")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    shutil.copytree(repository, tmp_path / "unpacked", ignore=shutil.ignore_patterns(".git"))
    shutil.copytree(tmp_path / "unpacked", repository / "vendored")
    git(tmp_path, "init", "-q", "fresh")
    shutil.copytree(tmp_path / "unpacked", tmp_path / "fresh", dirs_exist_ok=True)
    for where, problem, environment in (
        (tmp_path / "shallow", "a shallow clone", {}),
        (tmp_path / "unpacked", "not a git repository", {"GIT_CEILING_DIRECTORIES": str(tmp_path)}),
        (repository / "vendored", "part of another repository", {}),
        (repository, "git", {"PATH": "/nowhere"}),
        (tmp_path / "fresh", "", {}),
    ):
        status, printed = check(where, **environment)
        assert status == 0 and printed.startswith("commits: not checked: ") and problem in printed, printed
