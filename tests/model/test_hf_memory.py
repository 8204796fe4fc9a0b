"""Synthetic checkpoints (2 GB dense, experts, float32 masters) through import and export, in a process that is refused
more memory than it may hold.

The limit is the kernel's (RLIMIT_DATA: private writable memory, mapped files aside), set on top of what the process
already has before each phase; an allocation beyond it fails, which every phase first tries out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from envace_jax.model.spec import Qwen3Spec

pytestmark = pytest.mark.long

PROGRAM = """
import contextlib, ctypes, gc, json, resource, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from envace_jax.model.hf import import_folder, load_params, save_params
from envace_jax.model.name_map import axis_sizes, pieces
from envace_jax.model.spec import Qwen3Spec

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

class Watch:
    # The peak of resident memory above what was there at the start.
    def __enter__(self):
        self.start = self.peak = resident()
        self.on = True
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        return self
    def run(self):
        while self.on:
            self.peak = max(self.peak, resident())
            time.sleep(0.002)
    def __exit__(self, *_):
        self.on = False
        self.thread.join()
        self.above = self.peak - self.start

def private():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))

@contextlib.contextmanager
def limit(above):
    # No more than so many bytes above what is held now.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private() + above, before[1]))
    try:
        np.empty(above + (1 << 20), np.uint8)
    except MemoryError:
        pass
    else:
        raise SystemExit("the limit does not hold")
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)

folder, dtype = sys.argv[1], jnp.dtype(sys.argv[2])
shard, slack = 300_000_000, 64 << 20  # slack: compiled programs, Python, file buffers
spec = Qwen3Spec.from_hf_config(folder + "/source")
sizes = axis_sizes(spec)
largest = max(int(np.prod(p.entry.their_shape(sizes))) * 2 for p in pieces(spec))
arrays = spec.n_params() * dtype.itemsize
# Libraries are up, programs compiled.
import_folder(folder + "/source", folder + "/warm", shard_bytes=10**9)
save_params(folder + "/warm_saved", load_params(folder + "/warm", spec, dtype=dtype), spec, shard_bytes=10**9)
with limit(2 * largest + shard + slack), Watch() as imported:
    import_folder(folder + "/source", folder + "/imported", shard_bytes=shard)
with limit(arrays + 2 * largest + slack), Watch() as loaded:
    params = load_params(folder + "/imported", spec, dtype=dtype)
with limit(2 * largest + shard + slack), Watch() as saved:
    save_params(folder + "/saved", params, spec, shard_bytes=shard)
print(json.dumps({"largest": largest, "arrays": arrays, "import": imported.above,
                  "load": loaded.above, "save": saved.above}))
"""


DENSE = Qwen3Spec(50_000, 2048, 16, 16, 8, 128, 6144, rope_theta=5e6, tie_embeddings=False)
SMALL = dataclasses.replace(DENSE, n_layers=3)
EXPERTS = Qwen3Spec(
    40_000, 1024, 4, 8, 4, 128, 3072, rope_theta=1e6, n_experts=16, n_experts_per_token=2, d_ff_expert=768
)
"""The experts of one kind and layer (25 MB) come to the host together; the embedding has 82 MB."""


def write_source(folder: Path, spec: Qwen3Spec) -> None:
    """The model in bfloat16, written as a stream."""
    import ml_dtypes
    import numpy as np

    from envace_jax.model.hf import _plan_files
    from envace_jax.model.hf_folder import write_folder

    files = [[tensor for tensor, _ in file] for file in _plan_files(spec, "BF16", 500_000_000)]
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 20) * 0.02).astype(ml_dtypes.bfloat16)

    def produce(tensor):
        n = int(np.prod(tensor.shape))
        return np.resize(np.roll(noise, hash(tensor.name) % 997), n).reshape(tensor.shape)

    write_folder(
        folder,
        files,
        produce,
        config=spec.to_hf_config("bfloat16"),
        tokenizer_dir=None,
        texts={},
        source_id=None,
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("spec", "dtype", "size"),
    [(DENSE, "bfloat16", 2e9), (SMALL, "float32", 0.6e9), (EXPERTS, "bfloat16", 0.4e9)],
    ids=["2GB", "float32", "experts"],
)
def test_host_memory_stays_within_twice_the_largest_tensor(spec, dtype, size, tmp_path):
    write_source(tmp_path / "source", spec)
    assert sum(path.stat().st_size for path in (tmp_path / "source").iterdir()) > size
    # Freed memory goes back at once, so that what is held is what is counted.
    returning = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=1100,
        env=os.environ | returning,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    slack = 64 << 20  # compiled programs, Python, file buffers
    assert figures["import"] <= 2 * figures["largest"] + slack, figures
    assert figures["load"] <= figures["arrays"] + 2 * figures["largest"] + slack, figures
    # The bound is twice the largest tensor and one output shard; the shard is needed for conversions alone.
    shard = 0 if dtype == "bfloat16" else 300_000_000
    assert figures["save"] <= 2 * figures["largest"] + shard + slack, figures
    lines = [(tmp_path / name / "SHA256SUMS").read_text().splitlines() for name in ("imported", "saved")]
    tensors = [[line for line in ls if line.endswith(".safetensors")] for ls in lines]
    assert tensors[0] == tensors[1]  # values came back bit for bit
