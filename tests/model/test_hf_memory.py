"""A synthetic 2 GB checkpoint through import and export, in a process whose memory is watched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import json, resource, sys, threading, time
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

folder = sys.argv[1]
spec = Qwen3Spec.from_hf_config(folder + "/source")
sizes = axis_sizes(spec)
largest = max(int(np.prod(p.entry.their_shape(sizes))) * 2 for p in pieces(spec))
arrays = spec.n_params() * 2
import_folder(folder + "/source", folder + "/warm", shard_bytes=10**9)  # allocator and libraries are up
with Watch() as imported:
    import_folder(folder + "/source", folder + "/imported", shard_bytes=300_000_000)
with Watch() as loaded:
    params = load_params(folder + "/imported", spec, dtype=jnp.bfloat16)
with Watch() as saved:
    save_params(folder + "/saved", params, spec, shard_bytes=300_000_000)
print(json.dumps({"largest": largest, "arrays": arrays, "import": imported.above,
                  "load": loaded.above, "save": saved.above}))
"""


def write_source(folder: Path) -> None:
    """0.98B parameters in bfloat16, written as a stream."""
    import ml_dtypes
    import numpy as np

    from envace_jax.model.hf import _plan_files
    from envace_jax.model.hf_folder import write_folder
    from envace_jax.model.spec import Qwen3Spec

    spec = Qwen3Spec(50_000, 2048, 14, 16, 8, 128, 6144, rope_theta=5e6, tie_embeddings=False)
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
def test_host_memory_stays_within_twice_the_largest_tensor(tmp_path):
    write_source(tmp_path / "source")
    assert sum(path.stat().st_size for path in (tmp_path / "source").iterdir()) > 1.9e9
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    slack = 64 << 20  # compiled programs, Python, file buffers
    assert figures["import"] <= 2 * figures["largest"] + slack, figures
    assert figures["load"] <= figures["arrays"] + 2 * figures["largest"] + slack, figures
    assert figures["save"] <= 2 * figures["largest"] + slack, figures
    lines = [(tmp_path / name / "SHA256SUMS").read_text().splitlines() for name in ("imported", "saved")]
    tensors = [[line for line in ls if line.endswith(".safetensors")] for ls in lines]
    assert tensors[0] == tensors[1]  # values came back bit for bit
