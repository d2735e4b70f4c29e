"""argv -> CommandLine: verbs, our flags, and every mistake that can be found without Hydra.

No Hydra, no torch: a mistyped key is reported in a tenth of a second.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallelrun.base.errors import ConfigError, Problem
from parallelrun.cli import help
from parallelrun.cli.help import TOOLS, VERBS
from parallelrun.config import overrides as override_checks
from parallelrun.config import presets
from parallelrun.config.keys import GROUPS, known_keys, nearest, nearest_keys
from parallelrun.config.overrides import Override
from parallelrun.launch.over_ssh import hosts as host_list
from parallelrun.launch.over_ssh.hosts import HostRanks

COMMAND_LINE = "command line"
_HOSTS = ("ranks", "hosts", "hostfile")  # names of VALUED
_ANSWERING = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line. flags: Hydra's own, as typed; overrides: `key=value` in order.

    host_ranks: the hosts of -np and -H with their ranks, empty if neither was given; ssh_config: ssh's -F.
    """

    verb: str = "run"
    overrides: tuple[Override, ...] = ()
    flags: tuple[str, ...] = ()
    json: bool = False
    verbose: bool = False
    trust: bool = False
    multirun: bool = False
    host_ranks: tuple[HostRanks, ...] = ()
    ssh_config: str | None = None


def starts_ranks(argv: list[str]) -> bool:
    """Whether `argv` asks for a run; Hydra answers some flags (`--cfg`, `--info`, ...) by itself."""
    return not any(word.partition("=")[0] in _ANSWERING for word in argv)


def refuse_pickles(argv: list[str]) -> None:
    """Raise ConfigError for Hydra's flag that unpickles a file, in full or abbreviated as argparse allows."""
    for word in argv:
        name = word.partition("=")[0]
        if len(name) > 2 and help.PICKLE_FLAG.startswith(name):
            cause = f"{name}: a pickle can run any code when it is loaded, so none is read"
            command = "parallelrun recipe=RUN/config.yaml, with the run directory's own configuration"
            raise ConfigError(Problem(cause, COMMAND_LINE, command=command))


def read(argv: list[str]) -> CommandLine:
    """Parse `argv` (without the program's name; the first word may be a verb). Raises ConfigError with all mistakes."""
    words = list(argv)
    verb = words.pop(0) if words and words[0] in VERBS else "run"
    pairs: list[str] = []
    flags: list[str] = []
    switched: set[str] = set()
    problems: list[Problem] = []
    valued: dict[str, str] = {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word in help.SWITCHES:
            switched.add(help.SWITCHES[word])
        elif flag in help.VALUED:
            valued[help.VALUED[flag]] = value if equals else words.pop(0) if words else ""
        elif word.startswith("-") and word != "-":
            problems += _flag(word, words, flags)
        elif "=" in word or word.startswith("~"):
            problems += _pair(word, words, pairs)
        else:
            problems += _bare(word, words, argv)
    multirun = any(flag in ("-m", "--multirun") for flag in flags) or "hydra.mode=MULTIRUN" in pairs
    host_ranks = _host_ranks(valued, multirun, problems)
    ssh_config = valued.get("ssh_config")
    if ssh_config is not None and not Path(ssh_config).is_file():
        problems.append(Problem(f"--ssh-config {ssh_config}: no such file", COMMAND_LINE))
    if ssh_config is not None and not host_list.has_others(host_ranks):
        problems.append(Problem("--ssh-config: no other host is given", COMMAND_LINE, "-H server1:4,server2:4"))
    pairs += [f"world={sum(host.num_ranks for host in host_ranks)}"] if host_ranks else []
    overrides, more_problems = override_checks.read(
        pairs, multirun, COMMAND_LINE, presets.user_groups([*flags, *pairs])
    )
    problems += more_problems
    if problems:
        from parallelrun.cli import remaining

        raise ConfigError(*problems, *remaining.problems(overrides, [*flags, *pairs], problems))
    switches: dict[str, Any] = dict.fromkeys(switched, True)
    return CommandLine(
        verb,
        tuple(overrides),
        tuple(flags),
        multirun=multirun,
        host_ranks=host_ranks,
        ssh_config=ssh_config,
        **switches,
    )


def _flag(word: str, words: list[str], flags: list[str]) -> list[Problem]:
    """Move a Hydra flag and its value from `words` to `flags`, or say what to type instead of an unknown flag."""
    name, equals, value = word.partition("=")
    if name not in help.HYDRA_FLAGS and name.startswith("--"):
        full = [flag for flag in help.HYDRA_FLAGS if flag.startswith(name)]  # argparse accepts abbreviated flags
        name = full[0] if len(full) == 1 and len(name) > 4 else name
    if name not in help.HYDRA_FLAGS:
        return [_unknown_flag(word, name, words)]
    takes_value = help.HYDRA_FLAGS[name]
    flags.append(f"{name}{equals}{value}")
    if takes_value is None and not equals:  # written with =, or Hydra's parser would take the next word as its value
        flags[-1] = f"--info={words.pop(0) if words and words[0] in help.INFO_VALUES else 'all'}"
    if takes_value and not equals:
        if not words:
            return [Problem(f"{word}: a value must follow", COMMAND_LINE)]
        value = words.pop(0)
        flags.append(value)
    if name not in ("--cfg", "-c") or value in help.CFG_VALUES:
        return []
    fix = " or ".join(f"--cfg {legal}" for legal in nearest(value, help.CFG_VALUES) or help.CFG_VALUES)
    return [Problem(f"{name} {value}: must be one of {', '.join(help.CFG_VALUES)}", COMMAND_LINE, fix)]


def _unknown_flag(word: str, name: str, words: list[str]) -> Problem:
    key, value = name.lstrip("-").replace("-", "_"), word.partition("=")[2]
    takes_next = "=" not in word and bool(words) and "=" not in words[0] and not words[0].startswith("-")
    if takes_next:
        value = words.pop(0)
    is_key = key in known_keys() or key in GROUPS
    near_flag = difflib.get_close_matches(name, [*help.HYDRA_FLAGS, *help.OUR_FLAGS], n=1, cutoff=0.75)
    fix = near_flag[0] if near_flag and not is_key else override_checks.suggest_pairs(key, value)
    cause = f"{word}{f' {value}' if takes_next else ''}: options are written without dashes, as key=value"
    return Problem(cause, COMMAND_LINE, fix, "parallelrun --help")


def _pair(word: str, words: list[str], pairs: list[str]) -> list[Problem]:
    """Add an override to `given`, or report spaces around `=`."""
    if word.startswith("="):
        return [Problem(f"{word}: the key before = is missing", COMMAND_LINE, command="parallelrun --help")]
    if word.endswith("=") and words and _is_value(words[0]):
        value = words.pop(0)
        return [Problem(f"{word} {value}: no spaces around =", COMMAND_LINE, f"{word}{value}")]
    pairs.append(word)
    return []


def _is_value(word: str) -> bool:
    return "=" not in word and not word.startswith("-") and word not in VERBS


def _bare(word: str, words: list[str], argv: list[str]) -> list[Problem]:
    """The problem with a word that is neither a flag nor key=value."""
    if word in VERBS or word in TOOLS:  # not the first word
        first = argv[0] if argv[0] in VERBS else ""
        rest = [] if word in TOOLS else [other for other in argv if other not in VERBS and other not in TOOLS]
        cause = f"{word}: {first} is already the verb" if first else f"{word}: the verb must come first"
        return [Problem(cause, COMMAND_LINE, command=shlex.join(["parallelrun", word, *rest]))]
    if words and words[0].startswith("="):
        value = words.pop(0)[1:] or (words.pop(0) if words else "")
        return [Problem(f"{word} = {value}: no spaces around =", COMMAND_LINE, f"{word}={value}")]
    if word in known_keys() or word in GROUPS:
        value = words.pop(0) if words and _is_value(words[0]) else "..."
        return [Problem(f"{word}: a value is missing", COMMAND_LINE, f"{word}={value}")]
    if word.endswith((".yaml", ".yml")):
        return [Problem(f"{word}: a file needs recipe= before it", COMMAND_LINE, f"recipe={word}")]
    close = nearest(word, [*VERBS, *TOOLS], 2) if word is argv[0] else []
    if not close:
        close = [f"{group}={word}" for group in GROUPS if word in presets.options(group)]
        close += [
            f"{key.name}={word}" for key in known_keys().values() if word in key.choices and not key.is_of_presets
        ]
        close += ["resume=latest"] if word == "latest" else []
        close = close or [f"{key}=..." for key in nearest_keys(word)]
    cause = f"{word}: neither a verb nor key=value"
    return [Problem(cause, COMMAND_LINE, " or ".join(close[:3]), "parallelrun --help")]


def _host_ranks(valued: dict[str, str], multirun: bool, problems: list[Problem]) -> tuple[HostRanks, ...]:
    """The hosts and ranks of horovodrun's -np, -H and --hostfile, or () with the mistakes appended to `problems`."""
    values = [valued.pop(name, None) for name in _HOSTS]
    try:
        host_ranks = host_list.place_ranks(*values)
    except ConfigError as error:
        problems += error.problems
        return ()
    if multirun and host_list.has_others(host_ranks):
        cause = f"a sweep (-m) runs on this host only, and others are given: {host_ranks[-1].name}"
        problems.append(Problem(cause, COMMAND_LINE, "-H localhost:4"))
    return host_ranks
