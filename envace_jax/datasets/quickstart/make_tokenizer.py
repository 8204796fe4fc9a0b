"""Train the quickstart tokenizer: `python -m envace_jax.datasets.quickstart.make_tokenizer [--out FOLDER]`.

Made again it gives the same file: the texts come from the seeded generator alone. Digits stay single, so
that numbers are copied place by place; a JSON skeleton such as `{"name": "cancel_order", "arguments":
{"order": ` is one piece.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from envace_jax.datasets.quickstart.generator import generate_tasks
from envace_jax.text.tokenizer import load_tokenizer, train_sentencepiece
from envace_jax.text.transcript import canonical_json

VOCAB_SIZE = 768
MAX_PIECE = 64
TASKS = 2000
HOME = Path(__file__).resolve().parents[3] / "data" / "quickstart"
"""Where the tokenizer and the model lie."""


def corpus(count: int = TASKS) -> Iterator[str]:
    """The lines a policy of the desk reads and writes: talks, calls, results, the words around them."""
    for task in generate_tasks("train", count):
        for message in task.messages:
            yield message.role
            yield message.content
            for call in message.tool_calls:
                yield canonical_json({"name": call.name, "arguments": call.arguments})
        # Sentences vary most and calls least: without a second helping the merges would all go to the calls.
        yield from task.user_turns
        yield from task.user_turns
        # Marks before a call in REHEARSE's prompt stay apart from it: a call is the same pieces wherever it stands.
        yield from ("rehearse", "= ", "+ ")


def make_tokenizer(folder: str | Path) -> Path:
    """Train into `folder` and return the path of the `.model`; the folder also gets what `transformers`
    reads."""
    path = Path(folder) / "tokenizer.model"
    train_sentencepiece(
        (text for text in corpus() if text),
        path,
        VOCAB_SIZE,
        split_by_script=False,
        space_as_suffix=True,
        max_piece_length=MAX_PIECE,
    )
    load_tokenizer(path).save(folder)
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the quickstart tokenizer.")
    parser.add_argument("--out", default=str(HOME / "tokenizer"), help="folder to write (default: %(default)s)")
    path = make_tokenizer(parser.parse_args().out)
    tokenizer = load_tokenizer(path)
    print(f"{path}: {tokenizer.vocab_size} pieces, fingerprint {tokenizer.fingerprint[:16]}")


if __name__ == "__main__":
    main()
