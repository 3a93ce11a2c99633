"""The text of ``lightning-3d VERB --help`` for verbs that Hydra configures, read from the files alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lightning_3d.config.search import conf_dir, recipe_files
from lightning_3d.errors import few_and_more

# What the verbs of the command line do themselves; Hydra's other flags are those of Hydra's own help.
_OWN_FLAGS = "--cfg job, to see the configuration alone; --config-dir DIRECTORY, to add groups and recipes of your own"
_HYDRA_FLAGS = "-m, to sweep over lists of values; others of Hydra's: --hydra-help"
# Groups of Hydra's own settings.
_NOT_CHOSEN = ("hydra",)


def verb_help(verb: str, summary: str, *, jobs: bool) -> str:
    """Returns the help of a verb: its groups, and its options with what each of them is for.

    Args:
        verb: Its name, which is that of its main file of configuration too.
        summary: What it does.
        jobs: Whether Hydra runs it, with all of Hydra's flags.
    """
    rows = [
        f"usage: lightning-3d {verb} [OVERRIDE ...]",
        "",
        f"{summary[:1].upper()}{summary[1:]}.",
        "",
        "Groups: GROUP=NAME chooses a file, GROUP.KEY=VALUE changes a value of it",
        *(f"  {name:<10} {few_and_more(choices)}" for name, choices in _groups(conf_dir())),
        f"  {'recipe':<10} {', '.join(recipe_files())}",
        "",
        f"Options of {verb}: KEY=VALUE",
        *(f"  {line}".rstrip() for line in _own_options(conf_dir() / f"{verb}.yaml")),
    ]
    if verb != "train":
        rows += ["", "Options of the run that it looks at: lightning-3d train --help"]
    rows += ["", f"Flags: {_OWN_FLAGS}{f'; {_HYDRA_FLAGS}' if jobs else ''}."]
    return "\n".join(rows)


def _groups(home: Path) -> Iterator[tuple[str, list[str]]]:
    for folder in sorted(path for path in home.iterdir() if path.is_dir() and path.name not in _NOT_CHOSEN):
        yield folder.name, sorted(path.stem for path in folder.glob("*.yaml"))


def _own_options(path: Path) -> list[str]:
    """The lines of a main file after its list of defaults: what it sets itself, with its comments."""
    lines = path.read_text().splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("defaults:")), -1)
    rest = lines[begin + 1 :]
    while rest and (not rest[0].strip() or rest[0].startswith((" ", "-"))):
        rest = rest[1:]
    return rest
