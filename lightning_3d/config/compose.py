"""Hydra over the packaged configuration: composing a run, and the command line that does it."""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_3d.config.search import conf_dir, recipe_files
from lightning_3d.errors import ConfigError, Lightning3DError, nearest

RECIPE_GROUP = "recipe"
HYDRA_VERSION_BASE = "1.3"
# Hydra's arguments for every rank but the first, which alone writes .hydra and the log.
QUIET_RANK = ("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
_FULL_ERROR = "HYDRA_FULL_ERROR"
_CONFIG_DIR, _CFG = ("--config-dir", "-cd"), ("--cfg", "-c")


def compose_run(
    overrides: Sequence[str] = (), *, config_name: str = "train", config_dir: Path | None = None
) -> DictConfig:
    """Returns the configuration that the command line would compose, without running anything.

    Args:
        overrides: Hydra overrides, as on the command line.
        config_name: Main file of the verb.
        config_dir: A user's own directory of groups and recipes.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    own = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    home = hydra.initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE)
    with packaged_recipes(), readable_errors(), home:
        return hydra.compose(config_name, overrides=[*own, *overrides])


def command_words(arguments: Sequence[str]) -> tuple[list[str], Path | None, bool]:
    """Returns what the words of a verb say that composes a configuration and runs no job of Hydra's.

    Args:
        arguments: Hydra's overrides, ``--config-dir DIRECTORY``, and ``--cfg job`` to show the configuration alone.

    Returns:
        The overrides, the user's own directory of configuration, and whether to show the configuration alone.
    """
    words, overrides, directory, shows = list(arguments), [], None, False
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if name in _CONFIG_DIR:
            directory = Path(value or (words.pop(0) if words else ""))
        elif name in _CFG:
            shows = True
            if not value and words:
                words.pop(0)
        else:
            overrides.append(word)
    return overrides, directory, shows


def composed(arguments: Sequence[str], verb: str) -> DictConfig | None:
    """Returns the configuration of a verb that runs no job of Hydra's; None if it was to be shown alone, and was.

    Args:
        arguments: Hydra's overrides, ``--config-dir DIRECTORY``, and ``--cfg job`` to show the configuration alone.
        verb: The verb, which its main file is named after.

    Raises:
        ConfigError: Hydra cannot compose it.
    """
    overrides, directory, shows = command_words(arguments)
    cfg = compose_run(overrides, config_name=verb, config_dir=directory)
    if shows:
        print(OmegaConf.to_yaml(cfg), end="")
    return None if shows else cfg


def run_hydra(task: Callable[[DictConfig], Any], arguments: Sequence[str], *, config_name: str = "train") -> None:
    """Runs a task under Hydra: once, or once for each job of a sweep.

    Args:
        task: Function of the composed configuration.
        arguments: Hydra's arguments: flags and overrides.
        config_name: Main file of the verb.

    Raises:
        ConfigError: The configuration cannot be composed.
    """
    command_line = sys.argv
    begun: list[DictConfig] = []
    failed: list[Exception] = []

    @functools.wraps(task)
    def job(cfg: DictConfig) -> Any:
        # Hydra has read its arguments; from here on the process' own command line is the one to look at.
        sys.argv = command_line
        begun.append(cfg)
        try:
            return task(cfg)
        except Exception as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise
            # Raised outside of Hydra, which would print its overrides before it.
            failed.append(error)
            return None

    main = hydra.main(str(conf_dir()), config_name, HYDRA_VERSION_BASE)(job)
    with packaged_recipes(), readable_errors():
        sys.argv = [command_line[0], *arguments]
        try:
            main()
        except OSError as error:
            # A file of configuration that is not there is one of Hydra's, and an OSError as well.
            if begun or isinstance(error, HydraException):
                raise
            raise ConfigError(f"the run's directory cannot be made: {error}", fix="paths.log_dir=DIRECTORY") from error
        finally:
            sys.argv = command_line
        if failed:
            raise failed[0]


def with_overrides(arguments: Sequence[str], first: Sequence[str]) -> list[str]:
    """Returns a command line with overrides in front of its own, which count more where they have the same key.

    Hydra's parser takes overrides from one place of the command line only.

    Args:
        arguments: Hydra's flags and overrides.
        first: Overrides.
    """
    given = get_args_parser().parse_known_args(list(arguments))[0].overrides
    at = list(arguments).index(given[0]) if given else len(arguments)
    return [*arguments[:at], *first, *arguments[at:]]


class _Recipes(dict[str, Any]):
    """A group of Hydra's store in which files are read when they are asked for; there are many, and a run takes one."""

    def __getitem__(self, name: str) -> Any:
        node = super().__getitem__(name)
        if isinstance(node, Path):
            content, provider = cast(DictConfig, OmegaConf.load(node)), __name__.partition(".")[0]
            node = self[name] = ConfigNode(name, content, RECIPE_GROUP, "_global_", provider)
        return node


@contextmanager
def packaged_recipes() -> Iterator[None]:
    """Lets Hydra find the packaged recipes as group ``recipe``; its store is as before afterwards."""
    store = ConfigStore.instance()
    before = dict(store.repo.get(RECIPE_GROUP, {}))
    store.repo[RECIPE_GROUP] = _Recipes(before | {path.name: path for path in recipe_files().values()})
    try:
        yield
    finally:
        store.repo[RECIPE_GROUP] = before


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turns Hydra's and OmegaConf's errors into one that names the nearest key; ``HYDRA_FULL_ERROR=1`` leaves them."""
    asked = os.environ.get(_FULL_ERROR)
    # Otherwise Hydra prints the error itself, shortened, and ends the process.
    os.environ[_FULL_ERROR] = "1"
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        if asked == "1":
            raise
        raise _readable(error) from error
    finally:
        if asked is None:
            del os.environ[_FULL_ERROR]
        else:
            os.environ[_FULL_ERROR] = asked


@contextmanager
def told_plainly() -> Iterator[None]:
    """Gives what the reference models and data refuse, which know no error of ours, without a traceback.

    Raises:
        ConfigError: In place of their ValueError. Other people's keep their traceback: it shows where they are.
    """
    try:
        yield
    except ValueError as error:
        if isinstance(error, Lightning3DError):
            raise
        *_, (frame, _) = walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("lightning_3d.reference."):
            raise
        raise ConfigError(str(error)) from error


def _readable(error: Exception) -> ConfigError:
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _no_such_file(str(error.missing_cfg_file), error.options)
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        return _not_built(error, error.__cause__)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        return _no_such_key(str(cause.full_key), cause.parent_node)
    facts = [str(part).strip() for part in dict.fromkeys((error, cause)) if str(part).strip()]
    return ConfigError("\n".join(facts))


def _not_built(error: InstantiationException, cause: BaseException) -> ConfigError:
    """What a class of the user's (or of ours) said when it was made from its part of the configuration."""
    _, _, key = str(error).rpartition("full_key: ")
    kind = "" if isinstance(cause, ValueError | OSError) else f"{type(cause).__name__}: "
    return ConfigError(f"{key.strip() or 'an object'} cannot be made: {kind}{cause}")


def _no_such_file(file: str, options: Sequence[str]) -> ConfigError:
    group, _, name = file.removesuffix(".yaml").rpartition("/")
    close = nearest(name, options)
    return ConfigError(f"{group}={name} does not exist", valid=options, fix=f"{group}={close}" if close else None)


def _no_such_key(full_key: str, parent: DictConfig) -> ConfigError:
    prefix, _, name = full_key.rpartition(".")
    tree = OmegaConf.to_container(parent, resolve=False)
    assert isinstance(tree, dict)
    groups = [] if prefix else [path.name for path in conf_dir().iterdir() if path.is_dir()] + [RECIPE_GROUP]
    siblings = sorted({*groups, *(str(key) for key in tree if not str(key).startswith("_"))})
    close = nearest(name, siblings) or next((path for path in _paths(tree) if path.endswith(f".{name}")), None)
    # What the class would take besides; to look at it may take seconds of imports.
    others = [] if close else sorted({*_arguments(tree.get("_target_"))} - {*siblings})
    unset = nearest(name, others)
    fix = f"{prefix}.{close}".lstrip(".") if close else f"+{full_key}=... to add it"
    if unset is not None:
        fix = f"+{prefix}.{unset}=..., an argument of {tree['_target_']}"
    return ConfigError(
        f"there is no key {full_key} in the configuration",
        valid=[*siblings, *(f"+{one}" for one in others)],
        fix=fix,
    )


def _arguments(target: object) -> tuple[str, ...]:
    """The arguments of what a node makes; none if it cannot be looked at."""
    try:
        parameters = inspect.signature(pkgutil.resolve_name(str(target))).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):
        return ()
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def _paths(tree: Mapping[Any, Any]) -> Iterator[str]:
    for key, value in tree.items():
        if key == "hydra":  # its own options are no part of a run
            continue
        yield str(key)
        if isinstance(value, dict):
            yield from (f"{key}.{path}" for path in _paths(value))
