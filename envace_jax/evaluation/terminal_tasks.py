"""Small terminal tasks with their recorded keystrokes: errands in a folder, executed in a real shell.

Six kinds of errand over folders of small files; the words of the held-out ones never occur in the training ones. The
reference dialogue is not written but recorded: the keystrokes are typed into `TerminalEnvironment`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from envace_jax.datasets.records import Task
from envace_jax.evaluation.text_worlds import TerminalEnvironment
from envace_jax.text.transcript import Message, ToolCall, canonical_json

SOURCE = "terminal"
TOOL = {
    "type": "function",
    "function": {
        "name": "keys",
        "description": "Types into a terminal and tells what the screen shows then. Without a newline it stays typed.",
        "parameters": {
            "type": "object",
            "properties": {
                "keystrokes": {"type": "string", "description": "What is typed; empty to wait."},
                "duration": {"type": "number", "description": "Seconds to wait at most."},
            },
            "required": ["keystrokes"],
        },
    },
}
RULES = "You work in a terminal (bash) through the tool keys, in a folder of small text files."
PATIENCE = 5.0  # seconds for a command that ends by itself; it is over when the prompt is back

WORDS = {
    "train": "amber basil cedar delta ember fjord grove heron ivory jolly karst linen maple nylon olive pearl quartz "
    "raven sable tulip umber vivid willow yarrow zebra".split(),
    "heldout": "acorn birch coral daisy eagle fern gecko hazel iris jade kelp lemon mint nutmeg onyx poppy quail "
    "robin sage thyme urchin velvet walnut yucca zinnia".split(),
}


@dataclass
class Errand:
    """What is asked for, in which folder, and what is typed: (keystrokes, seconds)."""

    wish: str
    files: dict[str, str]
    typed: list[tuple[str, float]] = field(default_factory=list)

    def run(self, *commands: str) -> Errand:
        self.typed += [(f"{command}\n", PATIENCE) for command in commands]
        return self

    def type(self, text: str, seconds: float) -> Errand:
        self.typed.append((text, seconds))
        return self


Words = Callable[[], str]


def _append(word: Words) -> Errand:
    name, kept, new = f"{word()}.txt", word(), word()
    errand = Errand(f"Add the line {new} to {name} and count its lines.", {name: f"{kept}\n{word()}\n"})
    return errand.run("ls", f"cat {name}", f"echo {new} >> {name}", f"cat {name}", f"wc -l {name}")


def _search(word: Words) -> Errand:
    a, b, sought = f"{word()}.txt", f"{word()}.log", word()
    files = {a: f"{word()}\n{sought}\n", b: f"{sought} {word()}\n{word()}\n{sought}\n"}
    errand = Errand(f"Find out where {sought} stands, and write how often {b} has it into hits.txt.", files)
    count = f"grep -c {sought} {b}"
    return errand.run(f"grep -n {sought} *", count, f"cat {word()}.md", f"{count} > hits.txt")


def _tidy(word: Words) -> Errand:
    name, folder, other = f"{word()}.txt", word(), f"{word()}.txt"
    errand = Errand(f"Put {name} into a new folder {folder} under the name {other}.", {name: f"{word()}\n"})
    return errand.run(f"mkdir {folder}", f"cp {name} {folder}/", f"mv {folder}/{name} {folder}/{other}", f"rm {name}",
                      "ls", f"ls {folder}", f"cat {name}", f"cat {folder}/{other}")  # fmt: skip


def _edit(word: Words) -> Errand:
    name, old, new = f"{word()}.txt", word(), word()
    errand = Errand(f"Replace {old} by {new} in {name}, then sort it.", {name: f"{word()} {old}\n{old}\n{word()}\n"})
    return errand.run(f"cat {name}", f"sed -i 's/{old}/{new}/' {name}", f"head -n 1 {name}", f"sort -o {name} {name}",
                      f"cat {name}")  # fmt: skip


def _quote(word: Words) -> Errand:
    name, first, second = f"{word()}.txt", word(), word()
    errand = Errand(f"Write {first} and {second} on two lines into {name}.", {f"{word()}.md": f"{word()}\n"})
    return errand.run(f"echo '{first}", f"{second}' > {name}", f"cat {name}", "ls")


def _wait(word: Words) -> Errand:
    name, said = f"{word()}.txt", word()
    errand = Errand(f"Have the shell read {said} into a variable and write it into {name}.", {})
    errand.run("ls").type("read -r line\n", 0.3).type("", 0.1).run(said, f"echo $line > {name}", f"cat {name}")
    return errand


KINDS: tuple[tuple[str, Callable[[Words], Errand]], ...] = (
    ("append", _append), ("search", _search), ("tidy", _tidy), ("edit", _edit), ("quote", _quote), ("wait", _wait),
)  # fmt: skip


def terminal_tasks(split: str, count: int) -> list[Task]:
    """Errands of all kinds in turn; the n-th task of a split is always the same but for what the shell shows."""
    return [_recorded(split, k) for k in range(count)]


def _recorded(split: str, k: int) -> Task:
    rng = random.Random(f"terminal/{split}/{k}")
    words = iter(rng.sample(WORDS[split], 12))
    kind, make = KINDS[k % len(KINDS)]
    errand = make(lambda: next(words))
    messages = [Message("system", RULES), Message("user", errand.wish)]
    meta = {"environment": SOURCE, "split": split, "category": kind, "initial_state": {"files": errand.files}}
    task = Task(f"terminal-{split}-{kind}-{k}", SOURCE, tuple(messages), (TOOL,), (), meta)
    terminal = TerminalEnvironment()
    terminal.reset(task)
    try:
        for keystrokes, duration in errand.typed:
            arguments = {"keystrokes": keystrokes, "duration": duration}
            messages.append(Message("assistant", "", None, (ToolCall("keys", arguments),)))
            messages.append(Message("tool", canonical_json(terminal.step("keys", arguments))))
    finally:
        terminal.close()
    return Task(task.uuid, SOURCE, (*messages, Message("assistant", "Done.")), (TOOL,), (), meta)
