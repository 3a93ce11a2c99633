"""The command line: one table from verb to function. A verb's module is imported when the verb is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from lightning_3d import __version__
from lightning_3d.config.help import verb_help
from lightning_3d.errors import ConfigError, Lightning3DError, nearest
from lightning_3d.log import process_rank

_EXIT_USER_ERROR: Final = 2
_DEBUG_VARIABLE: Final = "LIGHTNING_3D_DEBUG"
_DEFAULT_VERB: Final = "train"
_HELP: Final = ("-h", "--help")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """One thing the command line can do.

    Args:
        function: ``module:name`` of a function that takes the remaining arguments and returns the exit code.
        summary: What it does, in one line of the help text.
        configured: Whether Hydra composes what it does, from a main file of its name.
        jobs: Whether Hydra runs it, too, once or for each job of a sweep.
    """

    function: str
    summary: str
    configured: bool = False
    jobs: bool = False

    def __call__(self, arguments: Sequence[str]) -> int:
        """Imports the function and returns its exit code."""
        module, name = self.function.split(":")
        return int(getattr(importlib.import_module(module), name)(arguments))


VERBS: Final = MappingProxyType(
    {
        "train": Verb(
            function="lightning_3d.train:run",
            summary="train, then test the best checkpoint",
            configured=True,
            jobs=True,
        ),
        "plan": Verb(
            function="lightning_3d.dryrun.tracing:plan",
            summary="which mesh, why, how much memory and time: estimates",
            configured=True,
        ),
        "dryrun": Verb(
            function="lightning_3d.dryrun:run",
            summary="any rank of any mesh, without devices: bytes, calls",
            configured=True,
        ),
        "verify": Verb(
            function="lightning_3d.verify:run",
            summary="train on one device and on the mesh; a certificate",
            configured=True,
            jobs=True,
        ),
        "convert": Verb(
            function="lightning_3d.convert:run", summary="a checkpoint in another form: see convert --help"
        ),
        "doctor": Verb(
            function="lightning_3d.doctor:run",
            summary="look at the environment; findings and fixes; measure=true: what the mesh does",
            configured=True,
        ),
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: The words after the program's name; those of the process if None.

    Returns:
        The exit code: 0 if all went well, 2 for an error of the user's, else what the verb returned.
    """
    try:
        return _dispatch(sys.argv[1:] if arguments is None else arguments)
    except Lightning3DError as error:
        if os.environ.get(_DEBUG_VARIABLE) == "1":
            raise
        rank = process_rank()
        print(f"lightning-3d{f' (rank {rank})' if rank else ''}: error: {error}", file=sys.stderr)
        return _EXIT_USER_ERROR


def help_text() -> str:
    """Returns the text of ``lightning-3d --help``."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: lightning-3d VERB [OVERRIDE ...]\n"
        "       lightning-3d --help | --version | VERB --help\n\n"
        f"{verbs}\n\n"
        "Overrides are Hydra's, e.g. lightning-3d train recipe=demo trainer.devices=4 strategy.zero_stage=3\n"
        f"Without a verb, overrides mean {_DEFAULT_VERB}. {_DEBUG_VARIABLE}=1 shows the traceback of an error."
    )


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in (*_HELP, "help"):
        print(help_text())
        return 0
    if arguments[0] == "--version":
        print(f"lightning-3d {__version__}")
        return 0
    word = arguments[0]
    if word in VERBS:
        verb, rest = VERBS[word], arguments[1:]
        if verb.configured and any(each in _HELP for each in rest):
            print(verb_help(word, verb.summary, jobs=verb.jobs))
            return 0
        return verb(rest)
    if word.startswith(("-", "+", "~")) or "=" in word:
        return VERBS[_DEFAULT_VERB](arguments)
    guess = nearest(word, VERBS)
    raise ConfigError(
        f"there is no verb {word!r}",
        valid=VERBS,
        fix=f"lightning-3d {guess}" if guess else "lightning-3d --help",
    )
