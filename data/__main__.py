"""Prepare a data set: ``python -m data {cm2,quickstart,traces} --out FOLDER [--path FILE …]``."""

from __future__ import annotations

import argparse
import sys

from envace_jax.config import UserError
from envace_jax.datasets.prepared import prepare, splits_of


def main(argv: list[str] | None = None) -> int:
    """Build the named data set and print its folder and its records by split; 2 on a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m data", description=__doc__)
    parser.add_argument("name", choices=("cm2", "quickstart", "traces"))
    parser.add_argument("--out", required=True, help="folder to write to; an existing build is reused")
    parser.add_argument("--path", default="", help="the CM2 file, or the file or folder of traces")
    parser.add_argument("--eval_path", default="", help="a CM2 file of held-out records")
    parser.add_argument("--on_bad_record", default="stop", choices=("stop", "skip"))
    parser.add_argument("--corpus", default="traces", help="name of the corpus of traces")
    flags = parser.parse_args(argv)
    if flags.name != "quickstart" and not flags.path:
        parser.error(f"{flags.name} needs --path")
    try:
        builder = _builder(flags)
        folder = prepare(builder)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {flags.out}: {error.strerror or error} ({error.filename})", file=sys.stderr)
        return 2
    bad = (builder.info.metadata or {}).get("bad_records", 0)
    print(f"{folder}: {splits_of(folder)}, {bad} broken records left out")
    return 0


def _builder(flags: argparse.Namespace):
    if flags.name == "quickstart":
        from data.quickstart.quickstart_dataset_builder import Builder as Quickstart

        return Quickstart(data_dir=flags.out)
    if flags.name == "traces":
        from data.traces.traces_dataset_builder import Builder as Traces
        from data.traces.traces_dataset_builder import TracesConfig

        traces = TracesConfig(name=flags.corpus, path=flags.path, on_bad_record=flags.on_bad_record)
        return Traces(data_dir=flags.out, config=traces)
    from data.cm2.cm2_dataset_builder import Builder, Cm2Config

    config = Cm2Config(path=flags.path, eval_path=flags.eval_path, on_bad_record=flags.on_bad_record)
    return Builder(data_dir=flags.out, config=config)


if __name__ == "__main__":
    sys.exit(main())
