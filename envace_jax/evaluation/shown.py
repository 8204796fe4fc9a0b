"""What REHEARSE is shown of a call that fidelity asks about: whether its answer stands in the prompt, and a grounding
that leaves it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envace_jax.datasets.records import RecordedCall, Task
from envace_jax.evaluation.fidelity import parse
from envace_jax.rehearsal.grounding import Brief, Grounding
from envace_jax.rehearsal.prompts import PromptWriter
from envace_jax.rewards.verifiers import json_equal
from envace_jax.text.transcript import ToolCall


def same_call(record: RecordedCall, call: ToolCall) -> bool:
    """Whether a record is of this call: name and arguments."""
    return record.name == call.name and json_equal(record.arguments, call.arguments)


@dataclass(frozen=True)
class Withheld:
    """Another grounding without the records of the call that is asked about."""

    inner: Grounding

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        brief = self.inner.brief(task, state, call)
        return replace(brief, examples=tuple(c for c in brief.examples if not same_call(c, call)))


@dataclass(frozen=True)
class Watched:
    """Another grounding that remembers the examples it gave."""

    inner: Grounding
    given: dict[int, RecordedCall] = field(default_factory=dict)  # by identity: arguments have no hash

    def brief(self, task: Task, state: Any, call: ToolCall) -> Brief:
        brief = self.inner.brief(task, state, call)
        self.given.update((id(record), record) for record in brief.examples)
        return brief

    def shows(self, prompt_ids: Sequence[int], call: ToolCall, actual: str, writer: PromptWriter) -> bool:
        """Whether an example of this call with exactly this answer stands in a prompt, as it was trimmed."""
        value = parse(actual)[1]
        found = [c for c in self.given.values() if same_call(c, call) and json_equal(parse(c.result)[1], value)]
        prompt = writer.chat.tokenizer.decode(prompt_ids) if found else ""
        return any(writer.example(record) in prompt for record in found)
