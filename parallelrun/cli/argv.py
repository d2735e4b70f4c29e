"""argv -> CommandLine, before Hydra: verbs, our flags, and every mistake that can be told without composing.

No Hydra, no torch: a mistyped key is answered in a tenth of a second.
"""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass, field, replace

from parallelrun.cli import hosts as host_list
from parallelrun.cli.hosts import HostRanks, SshOptions
from parallelrun.cli.words import CFG_VALUES, HYDRA_FLAGS, INFO_VALUES, OUR_FLAGS, PICKLE_FLAG, TOOLS, VERBS
from parallelrun.config import config_folder
from parallelrun.config import overrides as override_checks
from parallelrun.config.keys import GROUPS, known_keys, nearest
from parallelrun.config.overrides import Override
from parallelrun.errors import ConfigError, Problem

COMMAND_LINE = "command line"
_SWITCHES = {"--json": "json", "-v": "verbose", "--verbose": "verbose", "--trust": "trust"}
_VALUED = {
    "-np": "ranks",
    "-H": "hosts",
    "--ssh-port": "port",
    "--ssh-identity-file": "identity_file",
    "--ssh-config": "config",
}


@dataclass(frozen=True)
class CommandLine:
    """What the user typed, sorted. flags: Hydra's own, as given; overrides: `key=value` in order, as typed.

    placed: the hosts of -np and -H with their ranks, empty where neither was given; ssh: how others are reached.
    """

    verb: str = "run"
    overrides: tuple[Override, ...] = ()
    flags: tuple[str, ...] = ()
    json: bool = False
    verbose: bool = False
    trust: bool = False
    multirun: bool = False
    placed: tuple[HostRanks, ...] = ()
    ssh: SshOptions = field(default_factory=SshOptions)


_ANSWERING = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc")


def starts_ranks(argv: list[str]) -> bool:
    """Whether `argv` means a run at all: Hydra answers some flags (`--cfg`, `--info`, ...) by itself."""
    return not any(word.partition("=")[0] in _ANSWERING for word in argv)


def refuse_pickles(argv: list[str]) -> None:
    """Raise ConfigError for the flag of Hydra's that unpickles a file, in full or shortened as argparse allows."""
    for word in argv:
        name = word.partition("=")[0]
        if len(name) > 2 and PICKLE_FLAG.startswith(name):
            what = f"{name}: a pickle runs whatever code it holds, so none is read"
            command = "parallelrun recipe=RUN/config.yaml, with the run directory's own configuration"
            raise ConfigError(Problem(what, COMMAND_LINE, command=command))


def read(argv: list[str]) -> CommandLine:
    """Sort `argv` (without the program's name; the first word may be a verb). Raises ConfigError with all mistakes."""
    line = CommandLine()
    words = list(argv)
    if words and words[0] in VERBS:
        line = replace(line, verb=words.pop(0))
    given: list[str] = []
    flags: list[str] = []
    switched: set[str] = set()
    problems: list[Problem] = []
    valued: dict[str, str] = {}
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word in _SWITCHES:
            switched.add(_SWITCHES[word])
        elif flag in _VALUED:
            valued[_VALUED[flag]] = value if equals else words.pop(0) if words else ""
        elif word.startswith("-") and word != "-":
            problems += _flag(word, words, flags)
        elif "=" in word or word.startswith("~"):
            problems += _spaced(word, words, given)
        else:
            problems += _bare(word, words, argv)
    multirun = any(flag in ("-m", "--multirun") for flag in flags) or "hydra.mode=MULTIRUN" in given
    placed = _ranks_and_hosts(valued.pop("ranks", None), valued.pop("hosts", None), multirun, problems)
    ssh = SshOptions(**valued)
    problems += ssh.problems()
    if valued and not host_list.has_others(placed):
        problems.append(Problem("--ssh-...: no other host is given", COMMAND_LINE, "-H server1:4,server2:4"))
    given += [f"world={sum(one.num_ranks for one in placed)}"] if placed else []
    line = replace(
        line,
        flags=tuple(flags),
        multirun=multirun,
        json="json" in switched,
        verbose="verbose" in switched,
        trust="trust" in switched,
        placed=placed,
        ssh=ssh,
    )
    parsed, found = override_checks.read(given, multirun, COMMAND_LINE, config_folder.groups(flags))
    problems += found
    if problems:
        raise ConfigError(*problems)
    return replace(line, overrides=tuple(parsed))


def _flag(word: str, words: list[str], flags: list[str]) -> list[Problem]:
    """Take a flag of Hydra's and its value from `words` into `flags`."""
    name, equals, _ = word.partition("=")
    if name not in HYDRA_FLAGS and name.startswith("--"):
        full = [flag for flag in HYDRA_FLAGS if flag.startswith(name)]  # argparse lets long flags be shortened
        name = full[0] if len(full) == 1 and len(name) > 4 else name
    if name in HYDRA_FLAGS:
        takes_value = HYDRA_FLAGS[name]
        flags.append(name + word[len(word.partition("=")[0]) :])
        if takes_value is None and not equals:  # with its value, or Hydra's parser would take the next word for it
            flags[-1] = f"--info={words.pop(0) if words and words[0] in INFO_VALUES else 'all'}"
        if takes_value and not equals:
            if not words:
                return [Problem(f"{word}: a value must follow", COMMAND_LINE)]
            flags.append(words.pop(0))
        return _value_of_flag(name, flags[-1].partition("=")[2] if equals else flags[-1])
    key = name.lstrip("-").replace("-", "_")
    value = word.partition("=")[2]
    takes_next = not equals and bool(words) and "=" not in words[0] and not words[0].startswith("-")
    if takes_next:
        value = words.pop(0)
    is_key = key in known_keys() or key in GROUPS
    near_flag = difflib.get_close_matches(name, [*HYDRA_FLAGS, *OUR_FLAGS], n=1, cutoff=0.75)
    fix = near_flag[0] if near_flag and not is_key else override_checks.suggest_pairs(key, value)
    typed = f"{word} {value}" if takes_next else word
    what = f"{typed}: options are written without dashes, as key=value"
    return [Problem(what, COMMAND_LINE, fix, "parallelrun --help")]


def _value_of_flag(name: str, value: str) -> list[Problem]:
    """What Hydra's own parser would answer with its usage."""
    if name not in ("--cfg", "-c") or value in CFG_VALUES:
        return []
    fix = " or ".join(f"--cfg {one}" for one in nearest(value, CFG_VALUES) or CFG_VALUES)
    return [Problem(f"{name} {value}: one of {', '.join(CFG_VALUES)}", COMMAND_LINE, fix)]


def _spaced(word: str, words: list[str], given: list[str]) -> list[Problem]:
    """Take an override, or tell of spaces around `=`."""
    if word.startswith("=") or (word.endswith("=") and words and _is_value(words[0])):
        if word.startswith("="):
            return [Problem(f"{word}: the key before = is missing", COMMAND_LINE, command="parallelrun --help")]
        value = words.pop(0)
        return [Problem(f"{word} {value}: no spaces around =", COMMAND_LINE, f"{word}{value}")]
    given.append(word)
    return []


def _is_value(word: str) -> bool:
    return "=" not in word and not word.startswith("-") and word not in VERBS


def _bare(word: str, words: list[str], argv: list[str]) -> list[Problem]:
    """A word that is neither a flag nor key=value."""
    if word in VERBS or word in TOOLS:
        return [_misplaced_verb(word, argv)]
    if words and words[0].startswith("="):
        value = words.pop(0)[1:] or (words.pop(0) if words else "")
        return [Problem(f"{word} = {value}: no spaces around =", COMMAND_LINE, f"{word}={value}")]
    if word in known_keys() or word in GROUPS:
        value = words.pop(0) if words and _is_value(words[0]) else "..."
        return [Problem(f"{word}: a value is missing", COMMAND_LINE, f"{word}={value}")]
    if word.endswith((".yaml", ".yml")):
        return [Problem(f"{word}: a bare file name", COMMAND_LINE, f"recipe={word}")]
    close = nearest(word, [*VERBS, *TOOLS], 2) if word is argv[0] else []
    if not close:
        close = [f"{key}=..." for key in override_checks.suggest_keys(word)] + _presets_named(word)
    what = f"{word}: neither a verb nor key=value"
    return [Problem(what, COMMAND_LINE, " or ".join(close[:3]), "parallelrun --help")]


def _misplaced_verb(word: str, argv: list[str]) -> Problem:
    """A verb or tool that is not the first word, and the line with it in the first place."""
    first = argv[0] if argv[0] in VERBS else ""
    rest = [] if word in TOOLS else [other for other in argv if other not in VERBS and other not in TOOLS]
    what = f"{word}: one verb a line, and {first} is the first" if first else f"{word}: the verb comes first"
    return Problem(what, COMMAND_LINE, command=shlex.join(["parallelrun", word, *rest]))


def _presets_named(word: str) -> list[str]:
    from parallelrun.config import presets

    return [f"{group}={word}" for group in GROUPS if word in presets.options(group)]


def _ranks_and_hosts(
    ranks: str | None, hosts: str | None, multirun: bool, problems: list[Problem]
) -> tuple[HostRanks, ...]:
    """The places of horovodrun's -np and -H, or () with what is wrong with them appended."""
    try:
        placed = host_list.read(ranks, hosts)
    except ConfigError as error:
        problems += error.problems
        return ()
    if multirun and host_list.has_others(placed):
        problems.append(Problem(f"-H {hosts}: a sweep (-m) runs on this host", COMMAND_LINE, "-H localhost:4"))
    return placed
