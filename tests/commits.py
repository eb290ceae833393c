"""Checks the subjects of commits: `area: imperative`, at most 72 characters.

  python tests/commits.py

It checks the commits after the one that added this file, except merges. If they cannot be read (no git, a shallow
clone), it passes with a note. It needs no package, so it can run before the environment exists.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWN = Path(__file__).resolve().relative_to(ROOT).as_posix()
LONGEST = 72  # so that `git log --oneline` fits a terminal of 80 columns
AREA = r"[a-z0-9_./-]*[a-z0-9_/-]"
SUBJECT = re.compile(rf"{AREA}(?:, {AREA})*: (?P<verb>[a-z][a-z-]*)\b.*[^.\s]")
# A full check for imperatives takes a dictionary; these endings catch the other verb forms, with few exceptions.
OTHER_FORM = re.compile(r"\w+(?:(?<!e)ed|ing|(?<![siu])s)")
IMPERATIVES = {"alias", "always", "bias", "bring", "embed", "ping", "shed", "shred", "spring", "string", "swing", "wed"}
REMEDY = f"""write `area: imperative` in at most {LONGEST} characters (`scheduler: admit prefix hits first`), with
`git commit --amend` or `git rebase --interactive`; CONTRIBUTING.md says more"""


def fault(subject: str) -> str | None:
    """Returns what is wrong with a subject, or None."""
    if len(subject) > LONGEST:
        return f"{len(subject)} characters, {len(subject) - LONGEST} too many"
    if (found := SUBJECT.fullmatch(subject)) is None:
        return "it ends with a period" if subject.endswith(".") else "it does not read `area: imperative`"
    if OTHER_FORM.fullmatch(verb := found["verb"]) and verb not in IMPERATIVES:
        return f"{verb!r} is no imperative"
    return None


def git(*words: str) -> str:
    """Returns git's output in this file's repository.

    Raises:
        OSError: git is not installed.
        ValueError: git failed; the message is its last line.
    """
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ValueError((done.stderr.strip() or f"git {words[0]} ended with {done.returncode}").splitlines()[-1])
    return done.stdout.strip()


def subjects() -> list[tuple[str, str]]:
    """Returns the short hashes and subjects of the commits after the one that added this file, newest first.

    Raises:
        OSError, ValueError: they cannot be read.
    """
    if Path(git("rev-parse", "--show-toplevel")).resolve() != ROOT:
        raise ValueError(f"{ROOT} is part of another repository")
    if git("rev-parse", "--is-shallow-repository") == "true":
        raise ValueError("this is a shallow clone (`git fetch --unshallow` completes it)")
    added = git("log", "--diff-filter=A", "--format=%H", "--", OWN).splitlines()
    if not added:
        raise ValueError(f"no commit has {OWN} yet")
    log = git("log", "--no-merges", "--format=%h %s", f"{added[-1]}..HEAD")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in log.splitlines()]


def main() -> None:
    """Prints a line for each wrong subject, and exits with 1 if there are any."""
    try:
        found = subjects()
    except (OSError, ValueError) as error:
        print(f"commits: not checked: {error}")
        return
    wrong = [(commit, subject, problem) for commit, subject in found if (problem := fault(subject))]
    for commit, subject, problem in wrong:
        print(f"commits: {commit} {subject!r}: {problem}", file=sys.stderr)
    if wrong:
        sys.exit(f"commits: {len(wrong)} of {len(found)} subjects are wrong; {' '.join(REMEDY.splitlines())}")
    print(f"commits: {len(found)} subjects are fine")


if __name__ == "__main__":
    main()
